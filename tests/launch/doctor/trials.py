"""Ranks of an examination in threads, which exchange values in memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from mlm.launch.doctor import folder as folders

T = TypeVar("T")


def on_threads(monkeypatch: pytest.MonkeyPatch, work: Callable[[Any], T], ranks: int = 3) -> list[T]:
    """Return what `work(ctx)` returns on each rank."""
    slots, barrier = list[Any]([None] * ranks), Barrier(ranks, timeout=20.0)

    class Exchange:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def all_gather(self, value: Any) -> list[Any]:
            slots[self.rank] = value
            barrier.wait()
            answers = list(slots)
            barrier.wait()
            return answers

        def broadcast(self, value: Any) -> Any:
            return self.all_gather(value)[0]

    def run(rank: int) -> T:
        return work(SimpleNamespace(rank=rank, world_size=ranks, is_main=rank == 0))

    monkeypatch.setattr(folders, "Ranks", SimpleNamespace(of=lambda ctx: Exchange(ctx.rank)))
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
