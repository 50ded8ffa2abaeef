"""Texts as a model reads them: token ids with special tokens, cut to a length.

BERT reads [CLS] A [SEP] or [CLS] A [SEP] B [SEP], of which B [SEP] has token type 1 (arXiv:1810.04805,
figure 2). GPT-2 reads A eod or A eod B eod, without token types; what it says of a text is taken from its
last token. Special tokens that are written out in a text are letters of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mlm.data.tokenizer import Tokenizer
from mlm.errors import UserError
from mlm.models.family import family_of

Tokens = NDArray[np.int32]
ModelKind = str
BATCH = 10_000  # texts tokenised at a time


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """What a model reads at a time."""

    tokens: Tokens
    """[n] ids with special tokens, no padding."""
    second: int
    """tokens[second:] have token type 1; n if none have."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Frame:
    """The special tokens of a kind of model, and how many tokens it may read."""

    begin: Tokens
    """[1] for BERT, [0] for GPT-2."""
    end: Tokens
    """[1] behind each text."""
    types: bool
    """Whether a second text has a token type of its own."""
    max_length: int

    def room(self, texts: int) -> int:
        """Tokens that so many texts may have together."""
        return self.max_length - len(self.begin) - texts * len(self.end)

    def one(self, a: Tokens) -> Text:
        """A text by itself; it fits."""
        tokens = np.concatenate([self.begin, a, self.end])
        return Text(tokens, len(tokens))

    def two(self, a: Tokens, b: Tokens) -> Text:
        """One text behind another; they fit."""
        tokens = np.concatenate([self.begin, a, self.end, b, self.end])
        return Text(tokens, len(tokens) - len(b) - 1 if self.types else len(tokens))


def frame(tokenizer: Tokenizer, *, kind: ModelKind, max_length: int) -> Frame:
    """The special tokens that a kind of model needs. Raises UserError when the tokenizer lacks them."""
    if family_of(kind).causal:
        return Frame(tokens([]), tokens([tokenizer.eod_id]), types=False, max_length=max_length)
    if tokenizer.cls_id is None or tokenizer.sep_id is None:
        raise UserError(
            "the tokenizer has no [CLS] and [SEP], which BERT reads: give the one of the checkpoint"
        )
    return Frame(tokens([tokenizer.cls_id]), tokens([tokenizer.sep_id]), types=True, max_length=max_length)


def tokens(ids: Sequence[int]) -> Tokens:
    """[n] token ids."""
    return np.array(ids, dtype=np.int32)


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Token ids of texts, on all cores, equal ones in a row encoded once."""
    source = iter(texts)
    while batch := list(islice(source, BATCH)):
        distinct = list(dict.fromkeys(batch))
        ids = (np.frombuffer(found, dtype=np.uint32) for found in tokenizer.encode_batch(distinct))
        known = dict(zip(distinct, (found.astype(np.int32) for found in ids), strict=True))
        yield from (known[text] for text in batch)


def cut_longest(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept so that they fit: the longer one is cut until they are equal.

    As `tokenizers` does it by its strategy longest_first: of an odd room the longer text has one more.
    """
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    return (short, room - short) if first <= second else (room - short, short)
