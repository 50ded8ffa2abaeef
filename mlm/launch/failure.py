"""How ranks fail: what one leaves behind, which failure was the cause, and the one report of it.

Imports nothing heavy: a rank whose torch does not even import must be able to say so.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from mlm.errors import UserError, visible
from mlm.files.atomic import write_atomic
from mlm.parallel.watch import LostPeer, is_transport_error, name_ranks

INTERRUPTED = 130  # what a shell reports after Ctrl-C: 128 + SIGINT
LAST_WORDS_S = 1.0  # how long a failing rank stays for its peers to notice and report
RECORDS = "error-*.json"
MAX_LINES = 8  # lost peers that are told when there is no other cause


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
    exit_code: int = 1
    """What the rank ends with."""

    @property
    def names_peer(self) -> bool:
        """Whether the message is a LostPeer's, which says it all."""
        return self.type == LostPeer.__name__

    @property
    def text(self) -> str:
        """What is printed of it: a line for a user's mistake and a lost peer, else the traceback."""
        if self.is_user_error:
            return f"mlm: rank {self.rank}: " + "\n".join(map(visible, self.message.split("\n")))
        if self.names_peer:
            return f"mlm: {self.message}"
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
        exit_code=error.exit_code if isinstance(error, UserError) else 1,
    )


def is_lost_peer(error: BaseException) -> bool:
    """Whether the exception came from the transport between ranks: usually because another rank is gone."""
    return not isinstance(error, UserError) and is_transport_error(error)


class LastWords:
    """The failure of this rank, told once, by whichever of its threads meets it first."""

    def __init__(
        self, rank: int, tell: Callable[[Failure], None], others_failed: Callable[[], bool] = lambda: False
    ) -> None:
        self.others_failed = others_failed
        """Whether another rank has told of a failure."""
        self._rank, self._tell = rank, tell
        self._spoken = threading.Lock()

    def say(self, error: BaseException) -> Failure:
        """Tell of the exception that ends this rank, and return its record: the caller ends the process."""
        self._spoken.acquire()  # for good: a second thread has nothing to add before the process ends
        failure = describe(error, self._rank)
        self._tell(failure)
        return failure


def end_stopped(pids: Mapping[int, int]) -> dict[int, int]:
    """Kill those of the ranks' processes that a signal or a debugger has suspended, and return them."""
    stopped = {rank: pid for rank, pid in pids.items() if _process_state(pid) in ("T", "t")}
    for pid in stopped.values():
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # each rank leads its own session
    return stopped


def _process_state(pid: int) -> str:
    """The state letter of proc_pid_stat(5); empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def save_failure(failure: Failure, folder: Path) -> None:
    """Leave the record for the parent, as JSON. Raises OSError."""
    write_atomic(folder / f"error-{failure.rank:05d}.json", json.dumps(asdict(failure)).encode())


def load_failures(folder: Path) -> list[Failure]:
    """The records that ranks have left so far."""
    return [Failure(**json.loads(path.read_bytes())) for path in sorted(folder.glob(RECORDS))]


def report(
    failures: Sequence[Failure],
    deaths: Sequence[Death],
    *,
    world_size: int,
    logs: Path,
    stopped: Mapping[int, int] | None = None,
) -> tuple[str, int]:
    """What to print about a job that failed, and the command's exit code.

    The cause is, in this order: an exception of a rank's own; a process that ended without one; a lost peer.
    Within each, the first in time. `stopped` are the ranks that a signal had suspended, with their pids.
    """
    own = sorted((f for f in failures if not f.lost_peer), key=lambda f: f.time)
    if own:
        return _report_exception(own, world_size), own[0].exit_code
    recorded = {failure.rank for failure in failures}
    silent = sorted((d for d in deaths if d.rank not in recorded), key=lambda d: d.exit_code >= 0)
    lost = sorted(failures, key=lambda f: f.time)
    if silent:
        return _report_death(silent[0], lost, logs), 1
    if lost and lost[0].names_peer:
        return "\n".join([lost[0].text, *_suspects(lost, world_size, stopped or {}, logs)]), 1
    if lost:
        return _report_exception(lost[:1], world_size), lost[0].exit_code
    return "mlm: a rank failed without leaving a trace; the last checkpoint is intact", 1


def _report_exception(failures: Sequence[Failure], world_size: int) -> str:
    first = failures[0]
    same = sum(f.message == first.message for f in failures) == world_size
    return f"mlm: {first.message}" if first.is_user_error and same else first.text


def _suspects(lost: Sequence[Failure], world_size: int, stopped: Mapping[int, int], logs: Path) -> list[str]:
    """Why the first of the lost peers was lost, as far as it shows."""
    intact = "the last checkpoint is intact"
    silent = sorted(set(range(world_size)) - {failure.rank for failure in lost})
    if stopped:
        who = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in sorted(stopped.items()))
        return [f"mlm: found stopped, by SIGSTOP, SIGTSTP or a debugger: {who}; {intact}"]
    if silent:
        return [f"mlm: {name_ranks(silent)} waited for nobody: look there first, and in {logs}; {intact}"]
    waits = [failure.text for failure in lost[1 : 1 + MAX_LINES]]
    return [*waits, f"mlm: every rank was waiting, so they disagree about what comes next; {intact}"]


def _report_death(death: Death, lost: Sequence[Failure], logs: Path) -> str:
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
    noticed = [failure.text for failure in lost[:1] if failure.names_peer]
    heading = ["its last lines:"] if last else []
    return "\n".join([text, *noticed, *heading, *(f"  {line}" for line in last)])


def log_path(logs: Path, rank: int) -> Path:
    """Where a launched rank other than 0 writes what it prints."""
    return logs / f"rank-{rank:05d}.log"


def leave(code: int) -> NoReturn:
    """End the process now, without destructors that could wait for a peer stuck in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
