"""The parts of each rank's time, and the name of a slow rank.

Waiting is what `Watch` measures: on a CPU (gloo) all of it, on a GPU what the host waits for.
"""

import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mlm.checkpoint.native.exchange import Ranks
from mlm.parallel.mesh import ParallelContext

BUSY = ("computing", "reading data", "saving")
NAMES = {"data": "reading data", "saving": "saving", "validation": "validation"}


class Clock:
    """Seconds of this rank since the last report, by what they were spent on."""

    def __init__(self, ctx: ParallelContext) -> None:
        self.ctx = ctx
        self.start(0)

    def start(self, step: int) -> None:
        """Begin to measure after `step`."""
        self.since, self.step = time.monotonic(), step
        self.waited = dict(self.ctx.watch.spent)
        self.spent = dict.fromkeys(NAMES.values(), 0.0)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Measure a part that is not computing, less what it waits for."""
        begin, waited = time.monotonic(), sum(self.ctx.watch.spent.values())
        try:
            yield
        finally:
            waits = sum(self.ctx.watch.spent.values()) - waited
            self.spent[NAMES[what]] += time.monotonic() - begin - waits

    def shares(self, step: int) -> dict[str, float]:
        """Return this rank's seconds a step: computing, reading data, saving, waiting by axis."""
        steps, total = max(1, step - self.step), time.monotonic() - self.since
        spent = self.ctx.watch.spent
        waits = {
            f"waiting over {axis}": s - self.waited.get(axis, 0.0)
            for axis, s in spent.items()
            if axis != "world"
        }
        waits["waiting for all"] = spent.get("world", 0.0) - self.waited.get("world", 0.0)
        found = {**self.spent, **waits}
        found["computing"] = max(0.0, total - sum(found.values()))
        return {what: seconds / steps for what, seconds in found.items()}

    def gather(self, step: int) -> "Times":
        """Return every rank's shares and begin anew. Collective."""
        mine = {what: round(seconds, 6) for what, seconds in self.shares(step).items()}
        found = Ranks.of(self.ctx).all_gather([socket.gethostname(), mine])
        self.start(step)
        return Times([host for host, _ in found], [times for _, times in found])


class Times:
    """Seconds a step of every rank."""

    def __init__(self, hosts: Sequence[str], shares: Sequence[Mapping[str, float]]) -> None:
        self.hosts, self.shares = hosts, shares
        busy = [sum(times.get(what, 0.0) for what in BUSY) for times in shares]
        self.slowest = max(range(len(busy)), key=lambda rank: busy[rank])
        others = [seconds for rank, seconds in enumerate(busy) if rank != self.slowest]
        self.busy, self.median = busy, statistics.median(others)

    @property
    def factor(self) -> float:
        """Times as long as the median of the others that the slowest rank is busy."""
        return self.busy[self.slowest] / max(self.median, 1e-9)

    @property
    def cause(self) -> str:
        """The part of the slowest rank's time that exceeds the others' most."""
        own, rank = self.shares[self.slowest], self.slowest

        def excess(what: str) -> float:
            others = [times.get(what, 0.0) for other, times in enumerate(self.shares) if other != rank]
            return own.get(what, 0.0) - statistics.median(others)

        return max(BUSY, key=excess)

    def line(self) -> str:
        """Return the slowest rank, what it does, and how the others compare."""
        rank = self.slowest
        waits = {what: s for what, s in self.shares[rank].items() if what.startswith("waiting")}
        longest = max(waits, key=lambda what: waits[what], default=None)
        waiting = f", {waits[longest]:.3g} s {longest}" if longest else ""
        return (
            f"slowest rank {rank} (host {self.hosts[rank]}): busy {self.busy[rank]:.3g} s a step, the "
            f"median of the others {self.median:.3g} s; most of the difference is {self.cause}{waiting}"
        )

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        each = [{"host": host, **times} for host, times in zip(self.hosts, self.shares, strict=True)]
        return {"slowest": self.slowest, "factor": round(self.factor, 3), "cause": self.cause, "ranks": each}
