"""Assignment of samples to ranks, a thread that reads them ahead, and datasets without a corpus.

Shapes: B micro-batch, S sequence. Micro-batch j of a step holds samples consumed + j * B and on; of a
global batch of m * size micro-batches, data-parallel rank r takes j = r, size + r, 2 * size + r, … So the
samples of a step are a function of the consumed-sample counter alone, and dp may change on resume.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlm.config.imports import OwnCodeError
from mlm.parallel.config import IGNORE_INDEX
from mlm.util.splitmix import GOLDEN, draw, mix, root

if TYPE_CHECKING:  # corpora are checked without torch
    from torch import Tensor

Ids = NDArray[np.int64]


class MicroBatch(Protocol):
    """Part of every micro-batch, whatever else its model reads."""

    @property
    def tokens(self) -> "Tensor":
        """[B, S] int64."""
        ...

    @property
    def first_sample(self) -> int:
        """Number of its first sample in the whole run: dropout streams are a function of it."""
        ...


class SampleBlock(Protocol):
    """Samples in bulk that are more than windows of tokens, such as BERT's."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: "slice | Ids", /) -> Self: ...

    def followed_by(self, others: Sequence[Self], /) -> Self:
        """These samples and others after them."""
        ...

    def unscored_from(self, first: int, /) -> Self:
        """The same samples, of which those from `first` on are not scored."""
        ...

    def batch(self, first_sample: int, tensor: "Callable[[Ids], Tensor]", /) -> MicroBatch:
        """All of them as a micro-batch, of tensors made by `tensor`."""
        ...


Samples = Ids | SampleBlock
"""Samples gathered by a dataset: windows, int64 [n, S + 1], −100 where there is no token; or a block."""


class Dataset(Protocol):
    """Samples by number, as a loader reads them."""

    def __len__(self) -> int: ...

    def gather(self, sample_ids: ArrayLike, /) -> Samples: ...


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch."""

    tokens: "Tensor"
    """[B, S] int64: the model's input."""
    labels: "Tensor"
    """[B, S] int64: the token that follows each input; -100 is not scored."""
    first_sample: int
    """Number of the first sample in the whole run: dropout streams are a function of it."""


def collate(samples: Samples, first_sample: int, *, pin_memory: bool = False) -> MicroBatch:
    """A micro-batch of these samples.

    Of windows [B, S + 1] inputs and labels; a position without a token is fed 0 and not scored.
    """
    import torch  # late: checks of a corpus read this module and need none

    def tensor(x: NDArray[np.int64]) -> "Tensor":
        copied = torch.from_numpy(np.ascontiguousarray(x))
        # page-locked memory copies to a CUDA device without making the host wait
        return copied.pin_memory() if pin_memory else copied

    if not isinstance(samples, np.ndarray):
        return samples.batch(first_sample, tensor)
    return Batch(tensor(np.maximum(samples[:, :-1], 0)), tensor(samples[:, 1:]), first_sample)


Ranges = Sequence[tuple[int, int]]
"""Sample numbers that a run excludes: (first, count) in order, disjoint."""
Ramp = tuple[int, int, int]
"""Growth of the global batch: its first size, what it grows by, and the samples after which it is full."""


def batch_at(position: int, whole: int, ramp: Ramp | None) -> tuple[int, int | None]:
    """Return the samples of a step that begins with sample `position`, and where steps become larger.

    The latter is None once a step has all `whole` samples. Growth is even over the samples of the ramp, as in
    arXiv:2005.14165, section 2.3, and in Megatron-LM: a function of the position alone.
    """
    if ramp is None or position >= ramp[2]:
        return whole, None
    start, increment, samples = ramp
    stages = (whole - start) // increment
    stage = position * stages // samples
    return start + stage * increment, -(-(stage + 1) * samples // stages) if stages else samples


def first_of_step(
    consumed: int, number: int, whole: int, excluded_samples: Ranges, ramp: Ramp | None = None
) -> int:
    """Return the first sample of step `number` from here, of `whole` samples with consecutive numbers.

    A batch that would touch a range that is left out begins after it.
    """
    position, left = consumed, number
    while True:
        size, end = batch_at(position, whole, ramp)
        gap = next(
            ((first, first + count) for first, count in excluded_samples if first + count > position), None
        )
        steps = left if gap is None else min(left, max(0, (gap[0] - position) // size))
        steps = steps if end is None else min(steps, -(-(end - position) // size))
        position, left = position + steps * size, left - steps
        if gap is not None and position + batch_at(position, whole, ramp)[0] > gap[0]:
            position = gap[1]
        elif left == 0:
            return position


@dataclass(eq=False)
class RankSampler:
    """The samples of one data-parallel rank at each step."""

    dataset: Dataset
    consumed_samples: int
    global_batch_size: int
    micro_batch_size: int
    rank: int
    size: int
    pin_memory: bool = False
    excluded_samples: Ranges = ()
    ramp: Ramp | None = None

    def step(self, number: int) -> list[MicroBatch] | None:
        """This rank's micro-batches of the given step from here, or None when samples run out."""
        whole = self.global_batch_size
        begin = first_of_step(self.consumed_samples, number, whole, self.excluded_samples, self.ramp)
        end = begin + batch_at(begin, whole, self.ramp)[0]
        if end > len(self.dataset):
            return None
        stride = self.size * self.micro_batch_size
        first = np.arange(begin, end, stride) + self.rank * self.micro_batch_size
        ids = (first[:, None] + np.arange(self.micro_batch_size)).reshape(-1)
        samples, b = self.dataset.gather(ids), self.micro_batch_size
        return [
            collate(samples[i * b : (i + 1) * b], int(sample), pin_memory=self.pin_memory)
            for i, sample in enumerate(first)
        ]


@dataclass(eq=False)
class Loader(RankSampler):
    """Iterator over steps: each item is the list of this rank's micro-batches, read ahead by a thread.

    Ends when fewer than a global batch of samples is left. An error while reading surfaces in `next()`.
    Close it, or use it in a `with` block, so that the thread ends.
    """

    prefetch: int = 2
    """Steps that are ready, besides the one that is being read."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.global_batch_size % (self.micro_batch_size * self.size) == 0, (
            "checked with the configuration"
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlm-loader")
        self._ahead = deque[Future[list[MicroBatch] | None]]()
        self._next_step = 0
        for _ in range(max(1, self.prefetch) + 1):
            self._read_ahead()

    def _read_ahead(self) -> None:
        self._ahead.append(self._pool.submit(self.step, self._next_step))
        self._next_step += 1

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        batches = self._ahead[0].result() if self._ahead else None  # an error stays the first
        if batches is None:
            raise StopIteration
        self._ahead.popleft()
        self._read_ahead()
        return batches

    def close(self) -> None:
        """Stop reading and join the thread. What was read ahead is dropped; `next()` then ends."""
        self._ahead.clear()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def eval_batches(
    windows: Dataset, *, micro_batch_size: int, rank: int, size: int, limit: int | None = None
) -> Iterator[MicroBatch]:
    """Micro-batches of this rank such that all ranks together score every window exactly once.

    `limit` scores only the first so many windows, whatever the layout. Every rank yields the same number of
    micro-batches of the same shape; what fills them up is not scored.
    """
    count = len(windows) if limit is None else min(limit, len(windows))
    rounds = -(-count // (micro_batch_size * size))
    for i in range(rounds):
        first = (i * size + rank) * micro_batch_size
        ids = first + np.arange(micro_batch_size)
        samples = windows.gather(np.minimum(ids, count - 1))
        filled = max(0, count - first)  # from there on
        if isinstance(samples, np.ndarray):
            yield collate(np.where((ids < count)[:, None], samples, IGNORE_INDEX), first)
        else:
            yield collate(samples.unscored_from(filled), first)


class SyntheticDataset:
    """Uniform random samples. Sample i is a function of (seed, i): any rank draws any batch alone."""

    def __init__(self, vocab_size: int, seq_length: int, num_samples: int, seed: int) -> None:
        self.vocab_size, self.seq_length, self.num_samples = vocab_size, seq_length, num_samples
        self._key = mix(root(seed))

    def __len__(self) -> int:
        return self.num_samples

    def gather(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
        """Return samples in bulk: int64 [n, seq_length + 1], in [0, vocab_size)."""
        ids = np.asarray(sample_ids, dtype=np.uint64)
        keys = mix(self._key + ids * np.uint64(GOLDEN))  # [n]
        bits = draw(keys[:, None], np.arange(self.seq_length + 1)) >> np.uint64(32)
        # Scaling 32 bits instead of taking a remainder: faster, and as even for any real vocabulary.
        return ((bits * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int64)


@dataclass(frozen=True)
class CheckedDataset:
    """A dataset whose token ids are all in the vocabulary: others would train in silence.

    The token table is padded and split over ranks, so that no lookup rejects them.
    """

    dataset: Dataset
    kind: str
    """data.kind."""
    vocab_size: int
    seq_length: int
    noun: str = "sample"
    """Name of its samples in errors."""

    def __len__(self) -> int:
        return len(self.dataset)

    def gather(self, sample_ids: ArrayLike, /) -> Samples:
        """Return samples in bulk. Raises OwnCodeError (a UserError)."""
        samples: Any = self.dataset.gather(sample_ids)
        numbers = np.asarray(sample_ids).reshape(-1)
        if isinstance(samples, np.ndarray):
            shape = (len(numbers), self.seq_length + 1)
            if samples.dtype.kind not in "iu" or samples.shape != shape:
                raise OwnCodeError(
                    f"data.kind={self.kind}: gather() returned {samples.dtype} of shape {samples.shape}; "
                    f"return whole numbers of shape {shape}: samples of data.seq_length + 1 tokens"
                )
            self._check_ids(samples, numbers, may_ignore=True)
            return samples.astype(np.int64, copy=False)
        if not hasattr(samples, "batch"):
            raise OwnCodeError(
                f"data.kind={self.kind}: gather() returned a {type(samples).__name__}; return a NumPy array "
                "or a SampleBlock"
            )
        batch = collate(samples, 0)
        self._check_ids(batch.tokens.numpy(), numbers, may_ignore=False)
        if (labels := getattr(batch, "labels", None)) is not None:
            self._check_ids(labels.numpy(), numbers, may_ignore=True, what="label")
        return samples  # type: ignore[no-any-return]

    def _check_ids(
        self, ids: NDArray[Any], numbers: NDArray[Any], *, may_ignore: bool, what: str = "token"
    ) -> None:
        """Raise OwnCodeError for an id outside the vocabulary; IGNORE_INDEX is none where it `may_ignore`."""
        wrong = (ids < 0) | (ids >= self.vocab_size)
        if may_ignore:
            wrong &= ids != IGNORE_INDEX
        if not wrong.any():
            return
        row, *position = np.argwhere(wrong)[0]
        ignored = f", or {IGNORE_INDEX} where there is none" if may_ignore else ""
        raise OwnCodeError(
            f"data.kind={self.kind}: {self.noun} {numbers[row]} has {what} {ids[(row, *position)]} at "
            f"position {position[-1] if position else 0}, and model.vocab_size={self.vocab_size}; return ids "
            f"from 0 to {self.vocab_size - 1}{ignored}, or raise model.vocab_size"
        )
