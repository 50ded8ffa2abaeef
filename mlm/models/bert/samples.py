"""BERT samples: [CLS] A [SEP] B [SEP], for sentence-order prediction and masked-word prediction.

Sources: arXiv:1909.08053 (v1) and Megatron-LM's BERT dataset; the guide Data lists what differs. The corpus
holds a sequence for each sentence.

One pass over the corpus is an epoch: every sentence of every document of two sentences or more lies in
exactly one of its samples (pairs.py), which are shuffled within the epoch. Sample i is a function of (corpus,
settings, seed, i) alone, whatever num_samples is and whichever process reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlm.data.epochs import CACHE_FROM, EpochCache, permutation
from mlm.data.indexed import IndexedDataset
from mlm.data.sampler import SyntheticDataset
from mlm.models.bert.masking import BERTVocab, mask_tokens
from mlm.models.bert.pairs import TargetLengths, find_spans, make_pairs
from mlm.parallel.config import IGNORE_INDEX
from mlm.util.errors import UserError
from mlm.util.splitmix import draw, root

if TYPE_CHECKING:  # corpora are checked without torch
    from torch import Tensor

SPECIAL = 3
"""Special tokens of a sample: [CLS] and two [SEP]."""
BATCH = 1 << 17
"""Tokens made at a time: larger arrays leave the processor's caches."""
TARGETS, SAMPLES = 0, 1
"""Draws of the seed's stream: states of the epochs' target lengths, and of the samples."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BERTSamples:
    """n samples of S tokens."""

    tokens: Ids
    """int64 [n, S]: [CLS] A [SEP] B [SEP], then padding; masked."""
    token_types: Ids
    """int64 [n, S]: 1 for B and the [SEP] after it, else 0."""
    lengths: Ids
    """int64 [n]: tokens before the padding."""
    labels: Ids
    """int64 [n, S]: the true token where one is to be predicted, else -100."""
    is_swapped: Ids
    """int64 [n]: 1 if A follows B in the document (sentence-order prediction), -100 if not scored."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: "slice | Ids") -> "BERTSamples":
        return BERTSamples(*(getattr(self, f.name)[rows] for f in fields(self)))

    def followed_by(self, parts: "Sequence[BERTSamples]") -> "BERTSamples":
        names = [f.name for f in fields(self)]
        return BERTSamples(*(np.concatenate([getattr(x, name) for x in (self, *parts)]) for name in names))

    def batch(self, first_sample: int, tensor: "Callable[[Ids], Tensor]") -> "BERTBatch":
        tensors = {f.name: tensor(getattr(self, f.name)) for f in fields(self)}
        return BERTBatch(**tensors, first_sample=first_sample)

    def unscored_from(self, first: int) -> "BERTSamples":
        labels, is_swapped = self.labels.copy(), self.is_swapped.copy()
        labels[first:] = is_swapped[first:] = IGNORE_INDEX
        return BERTSamples(self.tokens, self.token_types, self.lengths, labels, is_swapped)


@dataclass(frozen=True, eq=False)
class BERTBatch:
    """One micro-batch of BERTSamples: [B, S], and [B] of lengths and is_swapped, int64."""

    tokens: "Tensor"
    token_types: "Tensor"
    lengths: "Tensor"
    labels: "Tensor"
    is_swapped: "Tensor"
    first_sample: int
    """Number of the first sample in the whole run."""


class BERTDataset:
    """Training samples of a corpus with one sequence per sentence. Sample ids run from 0 to num_samples.

    `cache_dir` keeps the samples' sentences of large epochs, as in GPTDataset (None: nowhere).

    Raises UserError if seq_length is too short for two sentences or no document has two.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        seq_length: int,
        num_samples: int,
        seed: int,
        vocab: BERTVocab,
        masked_lm_prob: float = 0.15,
        short_seq_prob: float = 0.1,
        max_ngram: int = 3,
        cache_dir: Path | None = None,
        cache_from: int = CACHE_FROM,
    ) -> None:
        if not SPECIAL + 2 <= seq_length < 1 << 20:
            raise UserError(
                f"data.seq_length={seq_length}: a BERT sample has [CLS], two [SEP] and two tokens at least: "
                f"set it from {SPECIAL + 2} to {(1 << 20) - 1}"
            )
        self.indexed, self.seq_length, self.num_samples, self.seed = indexed, seq_length, num_samples, seed
        self.vocab, self.masked_lm_prob, self.max_ngram = vocab, masked_lm_prob, max_ngram
        self.short_seq_prob, self.cache_from = short_seq_prob, cache_from
        self._epochs = EpochCache[Ids](
            self._build,
            lambda spans: spans.reshape(-1),
            lambda _, stored: None if len(stored) % 2 else stored.reshape(2, -1),
            folder=cache_dir,
            name="bert",
            key=self._key,
        )
        self._firsts = [0]  # first sample of epoch 0, 1, …, as far as epochs were built
        if self.epoch(0).shape[1] == 0:
            raise UserError(
                f"{indexed.bin_path} has no document of two sentences (sequences): build the corpus with "
                f"`mlm data build sentences=true`"
            )

    def __len__(self) -> int:
        return self.num_samples

    @property
    def epochs(self) -> float:
        """Passes over the corpus in all samples, as if each were full."""
        return self.num_samples * self.seq_length / self.indexed.num_tokens

    def gather(self, sample_ids: ArrayLike) -> BERTSamples:
        """Samples in bulk. The ids must be in range. Raises UserError on a token outside the vocabulary."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < self.num_samples), "sample id out of range"
        rows = max(1, BATCH // self.seq_length)
        first, *parts = (self._gather(ids[n : n + rows]) for n in range(0, max(1, len(ids)), rows))
        return first.followed_by(parts)

    def epoch(self, number: int) -> Ids:
        """First sequence of each of an epoch's samples and the one after its last, shuffled: int64 [2, n]."""
        # an estimate: building the samples gives their number
        size = self.indexed.num_documents + self.indexed.num_tokens // self.seq_length
        return self._epochs.get(number, is_large=size >= self.cache_from)

    def targets(self, epoch: int) -> TargetLengths:
        """Target lengths of an epoch's samples, [CLS] and [SEP] not counted."""
        state = draw(draw(root(self.seed), TARGETS), epoch)
        return TargetLengths(state, self.seq_length - SPECIAL, self.short_seq_prob)

    def _gather(self, ids: Ids) -> BERTSamples:
        # first sequence of each sample, the one after its last, its target length: int64 [n] each
        while self._firsts[-1] <= ids.max(initial=-1):
            self._firsts.append(self._firsts[-1] + self.epoch(len(self._firsts) - 1).shape[1])
        begins, ends, targets = np.empty((3, len(ids)), dtype=np.int64)
        epochs = np.searchsorted(self._firsts, ids, side="right") - 1
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            begins[rows], ends[rows] = self.epoch(epoch)[:, ids[rows] - self._firsts[epoch]]
            targets[rows] = self.targets(epoch).of(begins[rows])
        states = draw(draw(root(self.seed), SAMPLES), ids)
        pairs = make_pairs(self.indexed, begins, ends, targets, states)
        # [CLS] A [SEP] B [SEP] and padding: int64 [n, S]
        tokens = np.full((len(pairs.places), self.seq_length), self.vocab.pad_id, dtype=np.int64)
        tokens[:, 0] = self.vocab.cls_id
        source = self.indexed.tokens
        if self.indexed.stored is not None:
            self.indexed.stored.load(pairs.places, pairs.lengths)
        sizes = pairs.lengths.tolist()
        for row, (first, second), (a, b) in zip(tokens, pairs.places.tolist(), sizes, strict=True):
            row[1 : 1 + a] = source[first : first + a]
            row[1 + a] = row[2 + a + b] = self.vocab.sep_id
            row[2 + a : 2 + a + b] = source[second : second + b]
        self.vocab.check_tokens(tokens.view(np.uint64), self.indexed.bin_path)
        lengths = pairs.lengths.sum(axis=1) + SPECIAL
        columns = np.arange(self.seq_length)
        is_second = (columns >= pairs.lengths[:, :1] + 2) & (columns < lengths[:, None])
        tokens, labels = mask_tokens(
            tokens, lengths, self.vocab, states, masked_lm_prob=self.masked_lm_prob, max_ngram=self.max_ngram
        )
        return BERTSamples(
            tokens, is_second.astype(np.int64), lengths, labels, pairs.swapped.astype(np.int64)
        )

    def _build(self, number: int) -> Ids:
        spans = np.stack(find_spans(self.indexed, self.targets(number)))
        # streams 0 and 1 are GPTDataset's
        return spans[:, permutation(spans.shape[1], self.seed, number, stream=2)]

    def _key(self) -> str:
        rule = 1  # number of the sampling rule
        return f"{rule} {self.indexed.digest} {self.seq_length} {self.short_seq_prob!r} {self.seed}"


class SyntheticBERT:
    """Random BERT samples, a tenth of them short. Sample i is a function of (seed, i)."""

    def __init__(self, vocab_size: int, seq_length: int, num_samples: int, seed: int) -> None:
        self.vocab_size, self.seq_length, self.num_samples = vocab_size, seq_length, num_samples
        self._tokens = SyntheticDataset(vocab_size, seq_length, num_samples, seed)
        self._labels = SyntheticDataset(vocab_size, seq_length, num_samples, seed + 1)
        self._draws = SyntheticDataset(1 << 20, seq_length + 3, num_samples, seed + 2)

    def __len__(self) -> int:
        return self.num_samples

    def gather(self, sample_ids: ArrayLike) -> BERTSamples:
        s, draws = self.seq_length, self._draws.gather(sample_ids) / (1 << 20)  # [n, S + 4], below 1
        lengths = np.where(draws[:, s] < 0.1, 8 + draws[:, s + 1] * (s - 8), s).astype(np.int64)
        second = (1 + draws[:, s + 2] * (lengths - 1)).astype(np.int64)  # where the second segment begins
        columns = np.arange(s)
        inside = columns < lengths[:, None]
        is_masked = (inside & (draws[:, :s] < 0.15)) | (columns == 1)  # one at least
        return BERTSamples(
            tokens=np.where(inside, self._tokens.gather(sample_ids)[:, :s], 0),
            token_types=(inside & (columns >= second[:, None])).astype(np.int64),
            lengths=lengths,
            labels=np.where(is_masked, self._labels.gather(sample_ids)[:, :s], IGNORE_INDEX),
            is_swapped=(draws[:, s + 3] < 0.5).astype(np.int64),
        )
