"""Assignment of samples to ranks, and the thread that reads ahead."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray

from mlm.data.gpt import EvalWindows
from mlm.data.sampler import (
    Batch,
    Loader,
    RankSampler,
    SyntheticDataset,
    batch_at,
    eval_batches,
    first_of_step,
)
from tests.data.corpora import counting_corpus

SEQ = 3


class Numbers:
    """Sample i is i, i + 1000, i + 2000, …"""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def gather(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
        ids = np.asarray(sample_ids)
        if self.broken is not None and (ids == self.broken).any():
            raise OSError("disk gone")
        return ids[:, None] + 1000 * np.arange(SEQ + 1)


def steps(
    count: int = 32, consumed: int = 0, micro: int = 2, rank: int = 0, size: int = 1
) -> list[list[Batch]]:
    sizes = {"global_batch_size": 8, "micro_batch_size": micro, "rank": rank, "size": size}
    with Loader(Numbers(count), consumed_samples=consumed, **sizes) as loader:
        return list(loader)


def ids(batches: list[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.tokens[:, 0]]


def test_batch_holds_inputs_and_the_tokens_that_follow() -> None:
    batch = steps()[1][2]  # samples 12 and 13
    assert batch.tokens.tolist() == [[12, 1012, 2012], [13, 1013, 2013]]
    assert batch.labels.tolist() == [[1012, 2012, 3012], [1013, 2013, 3013]]
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.first_sample == 12


@pytest.mark.parametrize(("size", "micro"), [(1, 4), (4, 2)])
def test_ranks_together_read_each_global_batch_once(size: int, micro: int) -> None:
    by_rank = [steps(rank=rank, size=size, micro=micro) for rank in range(size)]
    for step in range(4):
        together = sorted(i for rank in by_rank for i in ids(rank[step]))
        assert together == list(range(8 * step, 8 * step + 8))


def open_loader(dataset: Numbers, **options: int) -> Loader:
    sizes = {"global_batch_size": 8, "micro_batch_size": 8, "rank": 0, "size": 1}
    return Loader(dataset, consumed_samples=0, **sizes, **options)  # type: ignore[arg-type]


def test_error_while_reading_surfaces_at_its_step_and_after() -> None:
    loader = open_loader(Numbers(80, broken=12))
    assert ids(next(loader)) == list(range(8))
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            next(loader)
    loader.close()


def test_loader_reads_no_further_than_its_prefetch() -> None:
    """prefetch steps wait in the queue and one more in the thread's hand."""
    asked: list[int] = []
    three = threading.Event()

    class Watched(Numbers):
        def gather(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
            asked.append(int(np.asarray(sample_ids)[0]))
            if len(asked) == 3:
                three.set()
            return super().gather(sample_ids)

    loader = open_loader(Watched(800), prefetch=2)
    assert three.wait(10)
    time.sleep(0.05)
    assert asked == [0, 8, 16]
    loader.close()


def test_close_ends_the_thread() -> None:
    loader = open_loader(Numbers(8000))
    next(loader)
    loader.close()
    assert not any("mlm-loader" in thread.name for thread in threading.enumerate())
    with pytest.raises(StopIteration):
        next(loader)


def scored(batches: Iterator[Batch]) -> list[int]:
    return [int(t) for batch in batches for t in batch.labels.ravel() if t != -100]


@pytest.mark.parametrize(("micro", "size"), [(1, 1), (3, 2), (16, 3)])
def test_evaluation_scores_every_token_once_at_any_layout(tmp_path: Path, micro: int, size: int) -> None:
    windows = EvalWindows(counting_corpus(tmp_path / "c", [20, 30]), seq_length=4)
    ranks = [list(eval_batches(windows, micro_batch_size=micro, rank=r, size=size)) for r in range(size)]
    assert sorted(t for rank in ranks for t in scored(iter(rank))) == list(range(1, 50))
    assert len({len(rank) for rank in ranks}) == 1
    assert {tuple(batch.tokens.shape) for rank in ranks for batch in rank} == {(micro, 4)}


def test_evaluation_limit_counts_windows_over_all_ranks(tmp_path: Path) -> None:
    windows = EvalWindows(counting_corpus(tmp_path / "c", [50]), seq_length=4)
    for size in (1, 2, 3):
        ranks = [eval_batches(windows, micro_batch_size=2, rank=r, size=size, limit=5) for r in range(size)]
        assert sorted(t for rank in ranks for t in scored(rank)) == list(range(1, 21))


@pytest.mark.parametrize("samples", [100, 7])
def test_batch_grows_evenly_over_the_samples_of_a_ramp(samples: int) -> None:
    """Megatron-LM's rule: start + increment int(consumed / (samples / increments)), then the whole batch."""
    whole, ramp = 16, (4, 4, samples)
    position, sizes = 0, []
    for number in range(40):
        assert first_of_step(0, number, whole, (), ramp) == position
        theirs = 16 if position >= samples else 4 + 4 * int(position / (samples / 3))
        assert batch_at(position, whole, ramp)[0] == theirs
        sizes.append(theirs)
        position += theirs
    assert sizes[0] == 4
    assert sizes == sorted(sizes)
    assert sizes[-1] == 16


def test_samples_of_a_ramp_are_read_once_whatever_dp_and_after_what_is_left_out() -> None:
    excluded_samples, ramp = ((30, 5), (60, 1)), (4, 4, 50)
    seen = {}
    for size in (1, 2):
        place = {"size": size, "pin_memory": False, "excluded_samples": excluded_samples, "ramp": ramp}
        ranks = [RankSampler(Numbers(300), 0, 12, 2, rank, **place) for rank in range(size)]  # type: ignore[arg-type]
        seen[size] = [sorted(i for rank in ranks for i in ids(rank.step(n) or [])) for n in range(12)]  # type: ignore[arg-type]
    assert seen[1] == seen[2]
    read = [sample for step in seen[1] for sample in step]
    assert read == sorted(set(read))
    assert not {*range(30, 35), 60} & {*read}
    assert {len(step) for step in seen[1]} == {4, 8, 12}


def test_sample_depends_on_seed_and_number_alone() -> None:
    few, many = SyntheticDataset(50_000, 7, 100, seed=5), SyntheticDataset(50_000, 7, 10**9, seed=5)
    samples = few.gather(range(100))
    np.testing.assert_array_equal(many.gather([3, 9, 3]), samples[[3, 9, 3]])
    other = SyntheticDataset(50_000, 7, 100, seed=6).gather(range(100))
    assert len({tuple(row) for row in np.concatenate([samples, other]).tolist()}) == 200
