"""Assignment of samples to ranks, a prefetching loader, and datasets without a corpus.

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
    """Samples in bulk with more than windows of tokens, such as BERT's."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: "slice | Ids", /) -> Self: ...

    def followed_by(self, others: Sequence[Self], /) -> Self:
        """These samples and others after them."""
        ...

    def unscored_from(self, first: int, /) -> Self:
        """The same samples, not scored from `first` on."""
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
    """Return a micro-batch of samples.

    Windows [B, S + 1] become inputs and labels; a position without a token is input 0 and not scored.
    """
    import torch  # lazy: checks of a corpus import this module without torch

    def tensor(x: NDArray[np.int64]) -> "Tensor":
        copied = torch.from_numpy(np.ascontiguousarray(x))
        # Copies from page-locked memory to a CUDA device do not block the host.
        return copied.pin_memory() if pin_memory else copied

    if not isinstance(samples, np.ndarray):
        return samples.batch(first_sample, tensor)
    return Batch(tensor(np.maximum(samples[:, :-1], 0)), tensor(samples[:, 1:]), first_sample)


Ranges = Sequence[tuple[int, int]]
"""Sample numbers that a run excludes: (first, count) in order, disjoint."""
Ramp = tuple[int, int, int]
"""Growth of the global batch: initial size, increment, and the samples after which it has its full size."""


def batch_at(position: int, full_size: int, ramp: Ramp | None) -> tuple[int, int | None]:
    """Return the samples of the step at sample `position`, and the position of the next larger step.

    The latter is None once steps have `full_size` samples. Growth is even over the samples of the ramp, as in
    arXiv:2005.14165, section 2.3, and in Megatron-LM: a function of the position alone.
    """
    if ramp is None or position >= ramp[2]:
        return full_size, None
    start, increment, samples = ramp
    stages = (full_size - start) // increment
    stage = position * stages // samples
    return start + stage * increment, -(-(stage + 1) * samples // stages) if stages else samples


def first_of_step(
    consumed: int, number: int, full_size: int, excluded_samples: Ranges, ramp: Ramp | None = None
) -> int:
    """Return the first sample of the step that is `number` steps after sample `consumed`.

    A step has up to `full_size` consecutive samples; one that would touch an excluded range begins after it.
    """
    position, steps_left = consumed, number
    while True:
        size, end = batch_at(position, full_size, ramp)
        gap = next(
            ((first, first + count) for first, count in excluded_samples if first + count > position), None
        )
        steps = steps_left if gap is None else min(steps_left, max(0, (gap[0] - position) // size))
        steps = steps if end is None else min(steps, -(-(end - position) // size))
        position, steps_left = position + steps * size, steps_left - steps
        if gap is not None and position + batch_at(position, full_size, ramp)[0] > gap[0]:
            position = gap[1]
        elif steps_left == 0:
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
        """Return this rank's micro-batches of step `number` from here, or None at the end of the samples."""
        full_size = self.global_batch_size
        begin = first_of_step(self.consumed_samples, number, full_size, self.excluded_samples, self.ramp)
        end = begin + batch_at(begin, full_size, self.ramp)[0]
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

    Ends when less than a global batch of samples remains. `next()` raises errors of the thread. Close it, or
    use it in a `with` block, to end the thread.
    """

    prefetch: int = 2
    """Steps that are ready, in addition to the one being read."""

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
        batches = self._ahead[0].result() if self._ahead else None  # an error is raised again at each call
        if batches is None:
            raise StopIteration
        self._ahead.popleft()
        self._read_ahead()
        return batches

    def close(self) -> None:
        """Stop reading and join the thread; `next()` then raises StopIteration."""
        self._ahead.clear()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def eval_batches(
    windows: Dataset, *, micro_batch_size: int, rank: int, size: int, limit: int | None = None
) -> Iterator[MicroBatch]:
    """Yield micro-batches of this rank such that all ranks together score every window exactly once.

    `limit` scores only the first windows, whatever the layout. Every rank yields the same number of
    micro-batches of the same shape; padding is not scored.
    """
    count = len(windows) if limit is None else min(limit, len(windows))
    rounds = -(-count // (micro_batch_size * size))
    for i in range(rounds):
        first = (i * size + rank) * micro_batch_size
        ids = first + np.arange(micro_batch_size)
        samples = windows.gather(np.minimum(ids, count - 1))
        num_scored = max(0, count - first)  # from there on
        if isinstance(samples, np.ndarray):
            yield collate(np.where((ids < count)[:, None], samples, IGNORE_INDEX), first)
        else:
            yield collate(samples.unscored_from(num_scored), first)


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
        # Scaling 32 bits is faster than a remainder, and as uniform for any real vocabulary.
        return ((bits * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int64)


@dataclass(frozen=True)
class CheckedDataset:
    """A user's dataset, checked for token ids outside of the vocabulary.

    The token table is padded and split over ranks, so lookups would not fail.
    """

    dataset: Dataset
    kind: str
    """data.kind."""
    vocab_size: int
    seq_length: int
    noun: str = "sample"
    """Noun for its samples in errors."""

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
            self._check_ids(labels.numpy(), numbers, may_ignore=True, noun="label")
        return samples  # type: ignore[no-any-return]

    def _check_ids(
        self, ids: NDArray[Any], numbers: NDArray[Any], *, may_ignore: bool, noun: str = "token"
    ) -> None:
        """Raise OwnCodeError for an id outside the vocabulary; `may_ignore` allows IGNORE_INDEX."""
        wrong = (ids < 0) | (ids >= self.vocab_size)
        if may_ignore:
            wrong &= ids != IGNORE_INDEX
        if not wrong.any():
            return
        row, *position = np.argwhere(wrong)[0]
        ignored = f", or {IGNORE_INDEX} where there is none" if may_ignore else ""
        raise OwnCodeError(
            f"data.kind={self.kind}: {self.noun} {numbers[row]} has {noun} {ids[(row, *position)]} at "
            f"position {position[-1] if position else 0}, and model.vocab_size={self.vocab_size}; return ids "
            f"from 0 to {self.vocab_size - 1}{ignored}, or raise model.vocab_size"
        )
