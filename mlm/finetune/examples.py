"""Examples: texts as token ids with special tokens, truncated to task.max_length.

BERT reads [CLS] A [SEP] or [CLS] A [SEP] B [SEP], where B [SEP] has token type 1 (arXiv:1810.04805,
figure 2); RoBERTa reads a second [SEP] before B, by its tokenizer's files. GPT-2 reads A eod or A eod B eod,
without token types, and predicts at the last token. Names of special tokens in a text are plain characters.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError

Tokens = NDArray[np.int32]
BATCH = 10_000  # texts tokenised at a time


@dataclass(frozen=True, slots=True, eq=False)
class InputText:
    """One input sequence of a model."""

    tokens: Tokens
    """[n] ids with special tokens, no padding."""
    second: int
    """tokens[second:] have token type 1; n if none have."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Input of one prediction: a row, or a window of one."""

    row: int
    """Index of the row in its split; windows of one context share it."""
    texts: tuple[InputText, ...]
    """One, or one per option of type choice."""
    label: Any
    """Target of the loss: an int, a float, or a tuple of ints; None without a label."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Omissions and changes, counted in the run's header."""


@dataclass(frozen=True)
class Frame:
    """Special tokens around texts, and the maximum length."""

    begin: Tokens
    """[1] for BERT, [0] for GPT-2."""
    end: Tokens
    """[1] after each text."""
    between: Tokens
    """Between the texts of a pair: `end`, for RoBERTa twice."""
    causal: bool
    """True for causal attention; otherwise a second text has token type 1."""
    max_length: int

    def room(self, texts: int) -> int:
        inner = (texts - 1) * len(self.between)
        return self.max_length - len(self.begin) - inner - len(self.end)

    def one(self, a: Tokens) -> InputText:
        tokens = np.concatenate([self.begin, a, self.end])
        return InputText(tokens, len(tokens))

    def two(self, a: Tokens, b: Tokens) -> InputText:
        tokens = np.concatenate([self.begin, a, self.between, b, self.end])
        return InputText(tokens, len(tokens) if self.causal else len(tokens) - len(b) - 1)


def frame(tokenizer: Tokenizer, *, causal: bool, max_length: int) -> Frame:
    """Return the special tokens that a model needs. Raises UserError if the tokenizer lacks them."""
    if causal:
        end = np.array([tokenizer.eod_id], dtype=np.int32)
        return Frame(end[:0], end, end, causal=True, max_length=max_length)
    if tokenizer.cls_id is None or tokenizer.sep_id is None:
        raise UserError(
            "the tokenizer has no [CLS] and [SEP], which BERT reads: give the one of the checkpoint"
        )
    begin, end = np.array([[tokenizer.cls_id], [tokenizer.sep_id]], dtype=np.int32)
    between = end.repeat(tokenizer.pair_separators)
    return Frame(begin, end, between, causal=False, max_length=max_length)


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yield the token ids of texts, encoded on all cores; equal texts of a batch are encoded once."""
    source = iter(texts)
    while batch := list(islice(source, BATCH)):
        distinct = list(dict.fromkeys(batch))
        ids = (np.frombuffer(encoded, dtype=np.uint32) for encoded in tokenizer.encode_batch(distinct))
        tokens = dict(zip(distinct, (encoded.astype(np.int32) for encoded in ids), strict=True))
        yield from (tokens[text] for text in batch)
