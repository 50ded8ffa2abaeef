"""Waits of this rank, for reports of hangs.

Every communication waits inside `Watch.waiting`. If the transport fails there (gloo at its timeout, or when a
peer's connection closes), the error becomes a `LostPeer` of one line. The watchdog (mlm/launch/failure.py)
finds waits beyond their limit by `Watch.overdue`.

On CUDA a wait returns at once and the stream waits instead: `Watch.follow` keeps an event per communication
until the watchdog sees it done.

Imports nothing heavy: mlm/launch/failure.py must work where torch does not.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TRANSPORT = (
    "gloo",
    "nccl",
    "shared memory",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
)


class LostPeer(RuntimeError):  # noqa: N818 - names the problem
    """Another rank failed in a communication. The message is one line for the user."""


def is_transport_error(error: BaseException) -> bool:
    """True if the exception came from the transport between ranks, usually after the loss of a rank."""
    if isinstance(error, LostPeer) or any(base.__name__ == "DistError" for base in type(error).__mro__):
        return True  # DistError is torch.distributed's own
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in TRANSPORT)


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 2, 3`, or of many ranks the first three, the last and how many they are."""
    if len(ranks) <= 8:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"ranks {', '.join(map(str, ranks[:3]))}, … {ranks[-1]}: {len(ranks)} of them"


@dataclass(slots=True, eq=False)
class Wait:
    """A context manager around the wait for a communication."""

    watch: "Watch"
    op: str
    axis: str
    ranks: tuple[int, ...]
    limit_s: float
    step: int
    since: float = 0.0
    done: Callable[[], bool] | None = None
    """For a wait of the device: returns True when it is over."""

    def __enter__(self) -> None:
        self.since = time.monotonic()
        self.watch.waits[id(self)] = self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        del self.watch.waits[id(self)]
        if not self.watch.waits:  # a wait inside another is part of it
            spent = self.watch.spent
            spent[self.axis] = spent.get(self.axis, 0.0) + time.monotonic() - self.since
        if error is None or isinstance(error, LostPeer) or not is_transport_error(error):
            return
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            raise self.unfinished() from error
        raise self.lost(f"broke: {self._peers()} gone") from error

    def unfinished(self) -> LostPeer:
        has_limit = self.done is None and math.isfinite(self.limit_s)
        limit_s = self.limit_s if has_limit else self.watch.timeout_s
        limit = f"{limit_s:g} s" + f" ({self.watch.setting})" * (limit_s == self.watch.timeout_s)
        return self.lost(f"did not finish in {limit}: {self._peers()} stuck, gone or waiting for another")

    def lost(self, problem: str) -> LostPeer:
        """Return an error with this rank, the step, the operation, the group and the problem."""
        step = f"step {self.step}: " if self.step else ""
        group = f"over {self.axis} ({name_ranks(self.ranks)})"
        return LostPeer(f"rank {self.watch.rank}: {step}{self.op} {group} {problem}")

    def _peers(self) -> str:
        peers = [rank for rank in self.ranks if rank != self.watch.rank]
        if len(peers) < 2:
            return f"rank {peers[0]} is" if peers else "this process is"
        return f"one of the other {len(peers)} ranks is"


@dataclass(eq=False)
class Watch:
    """Records the communications that a rank waits for. One per rank, shared by all axes and threads."""

    rank: int = 0
    """Global rank of this process."""
    timeout_s: float = math.inf
    """Seconds a communication may take."""
    setting: str = "dist.timeout_s"
    """The setting of the timeout, for messages."""
    step: int = 0
    """Current training step, from 1; 0 outside training."""
    waits: dict[int, Wait] = field(default_factory=dict)
    """Current waits, the innermost last."""
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds that this process has waited, by axis, without waits of a GPU."""
    followed: deque[Wait] = field(default_factory=lambda: deque(maxlen=1 << 14))
    """Waits of the device, the oldest first; longer than its launch queue."""

    def waiting(self, op: str, axis: str, ranks: tuple[int, ...], limit_s: float | None = None) -> Wait:
        """Context manager around a wait for `op` over the axis named `axis`, of these global ranks.

        `limit_s` replaces `timeout_s`: math.inf for regions that also compute, where only transport errors
        count. Waits may be nested; reports name the innermost. Raises LostPeer for transport errors.
        """
        return Wait(self, op, axis, ranks, self.timeout_s if limit_s is None else limit_s, self.step)

    def follow(self, op: str, axis: str, ranks: tuple[int, ...], done: Callable[[], bool]) -> None:
        """Record a communication that the device waits for, until `done()`."""
        # NCCL aborts the process at its timeout: report the hang before that
        limit_s = max(self.timeout_s / 2, self.timeout_s - 1.5)
        wait = Wait(self, op, axis, ranks, limit_s, self.step, time.monotonic(), done)
        self.followed.append(wait)

    def overdue(self, grace_s: float) -> LostPeer | None:
        """Return an error for a wait `grace_s` beyond its limit; the transport reports before that."""
        now = time.monotonic()
        for wait in reversed(list(self.waits.values())):
            if now - wait.since > wait.limit_s + grace_s:
                return wait.unfinished()
        oldest = self._oldest_followed()
        return oldest.unfinished() if oldest and now - oldest.since > oldest.limit_s else None

    def interrupted(self) -> LostPeer | None:
        """Return an error for the current wait when another rank has failed."""
        waits = list(self.waits.values())
        wait = waits[-1] if waits else self._oldest_followed()
        return None if wait is None else wait.lost("was under way when another rank failed")

    def _oldest_followed(self) -> Wait | None:
        """Return the oldest unfinished wait, removing finished ones. Called by the watchdog only."""
        while self.followed:
            oldest = self.followed[0]
            assert oldest.done is not None
            if not oldest.done():
                return oldest
            self.followed.popleft()
        return None
