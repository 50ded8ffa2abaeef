"""How ranks fail: what one leaves behind, which failure was the cause, and the one report of it.

Imports nothing heavy: a rank whose torch does not even import must be able to say so.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from mlm.config.errors import UserError
from mlm.files import write_atomic

INTERRUPTED = 130  # what a shell reports after Ctrl-C: 128 + SIGINT
LAST_WORDS_S = 1.0  # how long a failing rank stays for its peers to notice and report
TRANSPORT = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


@dataclass(frozen=True)
class Failure:
    """A rank's uncaught exception."""

    rank: int
    type: str
    message: str
    is_user_error: bool
    lost_peer: bool
    """Whether it looks like the consequence of another rank's death, not like a cause."""
    traceback: str
    time: float
    """Seconds since the epoch."""

    @property
    def exit_code(self) -> int:
        """2 for a user's mistake, else 1."""
        return 2 if self.is_user_error else 1

    @property
    def text(self) -> str:
        """What is printed of it: a line for a user's mistake, else the traceback."""
        if self.is_user_error:
            return f"mlm: rank {self.rank}: {self.message}"
        guess = ", probably because another rank is gone" if self.lost_peer else ""
        return f"mlm: rank {self.rank} failed{guess}:\n{self.traceback.rstrip()}"


@dataclass(frozen=True)
class Death:
    """How a rank's process ended by itself: its exit code, negative for a signal."""

    rank: int
    pid: int
    exit_code: int


def describe(error: BaseException, rank: int) -> Failure:
    """The record of an exception that ended a rank."""
    return Failure(
        rank=rank,
        type=type(error).__name__,
        message=str(error),
        is_user_error=isinstance(error, UserError),
        lost_peer=is_lost_peer(error),
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
    )


def is_lost_peer(error: BaseException) -> bool:
    """Whether the exception came from the transport between ranks: usually because another rank is gone."""
    if isinstance(error, UserError):
        return False
    if any(base.__name__ == "DistError" for base in type(error).__mro__):  # torch.distributed's own
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in TRANSPORT)


def save_failure(failure: Failure, folder: Path) -> None:
    """Leave the record for the parent, as JSON. Raises OSError."""
    write_atomic(folder / f"error-{failure.rank:05d}.json", json.dumps(asdict(failure)).encode())


def load_failures(folder: Path) -> list[Failure]:
    """The records that ranks have left so far."""
    return [Failure(**json.loads(path.read_bytes())) for path in sorted(folder.glob("error-*.json"))]


def report(
    failures: Sequence[Failure], deaths: Sequence[Death], *, world_size: int, logs: Path
) -> tuple[str, int]:
    """What to print about a job that failed, and the command's exit code.

    The cause is, in this order: an exception of a rank's own; a process that ended without one; a lost peer.
    Within each, the first in time.
    """
    own = sorted((f for f in failures if not f.lost_peer), key=lambda f: f.time)
    if own:
        return _report_exception(own, world_size), own[0].exit_code
    recorded = {failure.rank for failure in failures}
    silent = sorted((d for d in deaths if d.rank not in recorded), key=lambda d: d.exit_code >= 0)
    if silent:
        return _report_death(silent[0], logs), 1
    if failures:
        first = min(failures, key=lambda f: f.time)
        return _report_exception([first], world_size), first.exit_code
    return "mlm: a rank failed without leaving a trace; the last checkpoint is intact", 1


def _report_exception(failures: Sequence[Failure], world_size: int) -> str:
    first = failures[0]
    same = sum(f.message == first.message for f in failures) == world_size
    return f"mlm: {first.message}" if first.is_user_error and same else first.text


def _report_death(death: Death, logs: Path) -> str:
    who = f"rank {death.rank} (pid {death.pid})"
    if death.exit_code < 0:
        number = signal.Signals(-death.exit_code)
        why = f"was killed by signal {number.value} ({number.name})"
        hint = {
            signal.SIGKILL: "; often the kernel's out-of-memory killer (see dmesg)",
            signal.SIGABRT: "; often a collective that timed out or an assertion in C++",
            signal.SIGBUS: "; often a full /dev/shm or a file truncated while mapped",
        }.get(number, "")
    else:
        why, hint = f"left with exit code {death.exit_code}", ""
    text = f"mlm: {who} {why}{hint}; the last checkpoint is intact"
    log = log_path(logs, death.rank)
    last = log.read_text(errors="replace").splitlines()[-10:] if log.exists() else []
    return "\n".join([text, *(["its last lines:"] if last else []), *(f"  {line}" for line in last)])


def log_path(logs: Path, rank: int) -> Path:
    """Where a launched rank other than 0 writes what it prints."""
    return logs / f"rank-{rank:05d}.log"


def leave(code: int) -> NoReturn:
    """End the process now, without destructors that could wait for a peer stuck in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
