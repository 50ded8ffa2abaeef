"""Whole-word n-gram masking for BERT samples, a batch at once.

Words are split at random into n-grams of n = 1 … max_ngram words, P(n) proportional to 1/n; n-grams are
chosen in random order as long as they fit the sample's budget of tokens; each of their tokens becomes [MASK]
(80%), a random token (10%) or stays (10%). Sources: arXiv:1909.08053 (whole words, n-grams),
arXiv:1909.11942, section 4.1 (P(n)), arXiv:1810.04805, section 3.1 (80/10/10), Megatron-LM's
create_masked_lm_predictions (per token).

Shapes: n samples, S sequence; of a batch, laid out flat: P maskable tokens, W words, G n-grams.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.data.tokenizer import Tokenizer
from mlm.data.vocabulary_files import CLS, MASK, PAD, SEP
from mlm.parallel.config import IGNORE_INDEX
from mlm.util.errors import UserError
from mlm.util.splitmix import Bits, below, draw, uniform

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BERTVocab:
    """Special tokens and word starts of a tokenizer."""

    cls_id: int
    sep_id: int
    mask_id: int
    pad_id: int
    word_starts: Flags
    """bool [vocab_size]: whether a token begins a word (WordPiece: it has no ##)."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "BERTVocab":
        """Raises UserError when the tokenizer lacks one of the four special tokens."""
        ids = {CLS: tokenizer.cls_id, SEP: tokenizer.sep_id, MASK: tokenizer.mask_id, PAD: tokenizer.pad_id}
        special = [id for id in ids.values() if id is not None]
        if len(special) < len(ids):
            missing = ", ".join(name for name, id in ids.items() if id is None)
            raise UserError(
                f"the tokenizer has no {missing}, which BERT samples need: use BERT's, or train one with "
                "`mlm data tokenizer kind=wordpiece`"
            )
        cls_id, sep_id, mask_id, pad_id = special
        return cls(cls_id, sep_id, mask_id, pad_id, tokenizer.is_word_start)

    def check_tokens(self, tokens: NDArray[Any], path: Path) -> None:
        """Raise UserError if the corpus at `path` has one of these tokens outside the vocabulary."""
        if tokens.max(initial=0) >= (size := len(self.word_starts)):
            raise UserError(
                f"{path} holds token ids that the tokenizer's {size} do not cover: name the tokenizer that "
                "the corpus was built with"
            )

    @cached_property
    def is_special(self) -> Flags:
        """Flags of the four special tokens, never masked nor drawn as a random token: bool [vocab_size]."""
        flags = np.zeros(len(self.word_starts), dtype=bool)
        flags[[self.cls_id, self.sep_id, self.mask_id, self.pad_id]] = True
        return flags

    @cached_property
    def ordinary(self) -> Ids:
        """All other token ids: int64 [vocab_size - 4]."""
        return np.flatnonzero(~self.is_special)


@dataclass(frozen=True, eq=False)
class Grams:
    """The n-grams of a batch, by sample and position.

    tokens   int64 [P]      flat position of each maskable token in [n, S]
    lengths  int64 [G]      tokens of each n-gram; together they are `tokens` in order
    rows     int64 [G]      sample of each
    columns  int64 [G]      number of each in its sample
    words    int64 [G]      words of each
    """

    tokens: Ids
    lengths: Ids
    rows: Ids
    columns: Ids
    words: Ids


def mask_tokens(
    tokens: Ids, lengths: Ids, vocab: BERTVocab, states: Bits, *, masked_lm_prob: float, max_ngram: int
) -> tuple[Ids, Ids]:
    """Masked tokens and labels, int64 [n, S] each; labels are IGNORE_INDEX where nothing is predicted.

    tokens   int64 [n, S]: with cls, sep and padding
    lengths  int64 [n]: tokens without padding; max(1, round(masked_lm_prob * length)) are predicted at most
    states   uint64 [n]: the samples' random streams, of which draws 4 to 6 are used
    """
    grams = split_grams(tokens, vocab, draw(states, 4), max_ngram)
    budgets = np.maximum(1, np.rint(masked_lm_prob * lengths).astype(np.int64))
    chosen = choose_grams(grams, budgets, draw(states, 5))
    places = grams.tokens[np.repeat(chosen, grams.lengths)]  # flat in [n, S]
    originals = tokens.flat[places]
    labels = np.full_like(tokens, IGNORE_INDEX)
    labels.flat[places] = originals
    # 80 % become [MASK], 10 % a random token
    streams = draw(draw(states, 6)[places // tokens.shape[1]], places % tokens.shape[1])
    share = uniform(streams)
    random = vocab.ordinary[below(draw(streams, 0), len(vocab.ordinary))]
    masked = tokens.copy()
    masked.flat[places] = np.select([share < 0.8, share < 0.9], [vocab.mask_id, random], originals)
    return masked, labels


def split_grams(tokens: Ids, vocab: BERTVocab, states: Bits, max_ngram: int) -> Grams:
    """Split runs of words into n-grams. A run ends at a special token, so no n-gram leaves its segment.

    The k-th n-gram of a run has the size drawn for the run's k-th word, or the remainder of the run.
    """
    width = tokens.shape[1]
    maskable = ~vocab.is_special[tokens]
    run_starts = maskable.copy()
    run_starts[:, 1:] &= ~maskable[:, :-1]
    places = np.flatnonzero(maskable)
    is_run = run_starts.flat[places]
    word_begins = np.flatnonzero(vocab.word_starts[tokens.flat[places]] | is_run)  # [W] among places
    runs = np.flatnonzero(is_run[word_begins])  # first word of each run, among words
    run_words = np.diff(runs, append=len(word_begins))
    word_places = places[word_begins]
    sizes = draw_sizes(draw(states[word_places // width], word_places % width), max_ngram)
    # Where the n-grams of a run begin, were it endless: running sums of its words' draws.
    sums = np.cumsum(sizes) - sizes
    offsets = sums - np.repeat(sums[runs], run_words)
    inside = offsets < np.repeat(run_words, run_words)
    begins = (np.repeat(runs, run_words) + offsets)[inside]  # [G] among words
    rows = word_places[begins] // width
    per_row = np.bincount(rows, minlength=len(tokens))
    return Grams(
        tokens=places,
        lengths=np.diff(word_begins[begins], append=len(places)),
        rows=rows,
        columns=np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row),
        words=np.diff(begins, append=len(word_begins)),
    )


def draw_sizes(bits: Bits, max_ngram: int) -> Ids:
    """Sizes of n-grams: P(n) proportional to 1/n for n = 1 … max_ngram."""
    shares = np.cumsum(1 / np.arange(1, max_ngram + 1))
    return 1 + np.searchsorted(shares[:-1] / shares[-1], uniform(bits), side="right")


def choose_grams(grams: Grams, budgets: Ids, states: Bits) -> Flags:
    """Choose n-grams in random order, skipping the ones that no longer fit: bool [G]."""
    count = int(grams.columns.max(initial=-1)) + 1
    # The low bits of a key are its column, below 2**20: keys differ, and sorting them sorts the columns too.
    low = np.uint64((1 << 20) - 1)
    keys = np.full((len(budgets), count), ~np.uint64(0))
    columns = grams.columns.astype(np.uint64)
    keys[grams.rows, grams.columns] = (draw(states[grams.rows], columns) & ~low) | columns
    keys.sort(axis=1)
    # Padding of a row sorts last, as its last column, then no n-gram: its length is above any budget.
    order = np.minimum(keys & low, np.uint64(max(0, count - 1))).astype(np.int64)
    lengths = np.full((len(budgets), count), np.int64(1 << 32))
    lengths[grams.rows, grams.columns] = grams.lengths
    in_order = fill(np.take_along_axis(lengths, order, axis=1), budgets)
    chosen = np.zeros((len(budgets), count), dtype=bool)
    np.put_along_axis(chosen, order, in_order, axis=1)
    return chosen[grams.rows, grams.columns]


def fill(lengths: Ids, budgets: Ids) -> Flags:
    """Choose lengths that fit the row's remaining budget, left to right: int64 [n, k], [n] -> bool [n, k]."""
    chosen = np.zeros(lengths.shape, dtype=bool)
    rows = np.arange(len(lengths))
    while len(rows):
        # Choose up to the first that does not fit after its predecessors; retry the later ones without it.
        fits = (lengths <= budgets[:, None]) & ~chosen[rows]
        sums = np.cumsum(np.where(fits, lengths, 0), axis=1)
        new = fits & (sums <= budgets[:, None])
        chosen[rows] |= new
        budgets = budgets - (new * lengths).sum(axis=1)
        again = (fits & ~new).any(axis=1) & (budgets > 0)
        rows, budgets, lengths = rows[again], budgets[again], lengths[again]
    return chosen
