"""Ranks of an examination in threads, over a store in memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore

from mlm.launch.doctor.findings import Control

T = TypeVar("T")


def on_threads(work: Callable[[Control], T], ranks: int = 3, timeout_s: float = 20.0) -> list[T]:
    """Return what `work` returns on each rank; rank r is on host `h{r}`."""
    store, hosts = HashStore(), [f"h{rank}" for rank in range(ranks)]

    def run(rank: int) -> T:
        control = Control(store, rank, ranks, timeout_s)
        control.hosts = hosts
        return work(control)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
