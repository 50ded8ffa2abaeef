"""Failures of ranks: the record that one leaves, the watchdog of hangs, and the one report of the cause.

Imports nothing heavy: a rank that cannot import torch must be able to report it.
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

from mlm.parallel.watch import LostPeer, Watch, is_transport_error, name_ranks
from mlm.util.errors import UserError, escape_controls
from mlm.util.files import write_atomic

REPORT_S = 1.0  # seconds that a failing rank stays, so that its peers notice and report
WATCH_POLL_S = 0.25
GRACE_S = 2.0  # lets the transport's own error come first
RECORDS, EXIT_CODE = "error-*.json", "exit-code"
MAX_LINES = 8  # lost peers reported if there is no other cause


@dataclass(frozen=True)
class Failure:
    """A rank's uncaught exception."""

    rank: int
    type: str
    message: str
    is_user_error: bool
    lost_peer: bool
    """True if another rank's death may have caused it."""
    traceback: str
    time: float
    """Seconds since the epoch."""
    exit_code: int = 1

    @property
    def names_peer(self) -> bool:
        """True if the message is a LostPeer's, which needs no traceback."""
        return self.type == LostPeer.__name__

    @property
    def text(self) -> str:
        """Printed form: one line for a user's mistake or a lost peer, else the traceback."""
        if self.is_user_error:
            return f"mlm: rank {self.rank}: " + "\n".join(map(escape_controls, self.message.split("\n")))
        if self.names_peer:
            return f"mlm: {self.message}"
        guess = ", probably because another rank is gone" if self.lost_peer else ""
        return f"mlm: rank {self.rank} failed{guess}:\n{self.traceback.rstrip()}"


@dataclass(frozen=True)
class ProcessEnd:
    """End of a rank's process: its exit code, negative for a signal."""

    rank: int
    pid: int
    exit_code: int


def describe(error: BaseException, rank: int) -> Failure:
    is_user_error = isinstance(error, UserError)
    return Failure(
        rank=rank,
        type=type(error).__name__,
        message=str(error),
        is_user_error=is_user_error,
        lost_peer=not is_user_error and is_transport_error(error),
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
        exit_code=error.exit_code if isinstance(error, UserError) else 1,
    )


class FailureReporter:
    """Reports the failure of this rank once, from the first thread that finds it."""

    def __init__(
        self, rank: int, publish: Callable[[Failure], None], others_failed: Callable[[], bool] = lambda: False
    ) -> None:
        self.others_failed = others_failed
        """True if another rank has reported a failure."""
        self._rank, self._publish = rank, publish
        self._reported = threading.Lock()

    def report(self, error: BaseException) -> Failure:
        """Report the exception that ends this rank, and return its record: the caller ends the process."""
        self._reported.acquire()  # never released: a second thread has nothing to add
        failure = describe(error, self._rank)
        self._publish(failure)
        return failure


class Watchdog:
    """Thread that ends a rank whose communication hangs without an error.

    gloo raises at its timeout; NCCL leaves the host waiting in a later call. The watchdog polls, so that
    watching a communication costs nothing, reports an overdue one through `reporter` and ends the process
    with exit code 1. When another rank has failed, it reports the communication that this rank waits for; a
    rank without a report is the suspect. `prepare` is called once in the thread.
    """

    def __init__(
        self, watch: Watch, reporter: FailureReporter, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._watch, self._reporter, self._prepare = watch, reporter, prepare
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        self._prepare()
        while not self._over.wait(WATCH_POLL_S):
            lost = self._watch.overdue(GRACE_S)
            if lost is None and self._reporter.others_failed():
                lost = self._watch.interrupted()
            if lost is not None:
                on_device = bool(self._watch.followed)
                failure = self._reporter.report(lost)
                if on_device:
                    time.sleep(10.0)  # NCCL's flight recorder writes its file within seconds of the timeout
                exit_now(failure.exit_code)


def flight_recorder(base: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    """Return variables, unless set in `base`, that have NCCL write the collectives under way at a timeout.

    One file per rank in `folder`, or in torch's default: pickles, which `torchfrtrace` reads.
    """
    variables = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in base:  # torch reads its former names too, but ours first
        variables["TORCH_FR_BUFFER_SIZE"] = "2000"
    if folder is not None and "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in base:
        variables["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / "nccl-rank-")
    return {key: value for key, value in variables.items() if key not in base}


def save_failure(failure: Failure, folder: Path) -> None:
    """Write the record for the parent as JSON. Raises OSError."""
    write_atomic(folder / f"error-{failure.rank:05d}.json", json.dumps(asdict(failure)).encode())


def load_failures(folder: Path) -> list[Failure]:
    return [Failure(**json.loads(path.read_bytes())) for path in sorted(folder.glob(RECORDS))]


def note_exit_code(folder: Path, code: int) -> None:
    """Write the command's exit code for the parent: a rank that exits with it would seem to have failed."""
    with suppress(OSError):
        write_atomic(folder / EXIT_CODE, str(code).encode())


def noted_exit_code(folder: Path) -> int:
    """Return the exit code that a rank wrote; 0 without one."""
    try:
        return int((folder / EXIT_CODE).read_text())
    except (OSError, ValueError):
        return 0


def report(
    failures: Sequence[Failure],
    ends: Sequence[ProcessEnd],
    *,
    world_size: int,
    logs: Path,
    note: str = "",
) -> tuple[str, int]:
    """Return the report of a failed job, and the command's exit code.

    Causes in order: a rank's exception; a process that ended without one; a lost peer. The first in time
    counts. `ends`: processes that the command did not end itself.
    `note`: words on the checkpoints of a run, for a command with a run folder.
    """
    causes = sorted((f for f in failures if not f.lost_peer), key=lambda f: f.time)
    if causes:
        first = causes[0]
        is_same = sum(f.message == first.message for f in causes) == world_size
        return f"mlm: {first.message}" if first.is_user_error and is_same else first.text, first.exit_code
    recorded = {failure.rank for failure in failures}
    silent = sorted(
        (end for end in ends if end.exit_code and end.rank not in recorded),
        key=lambda end: end.exit_code >= 0,
    )
    lost = sorted(failures, key=lambda f: f.time)
    if silent:
        death, hint = silent[0], ""
        why = f"left with exit code {death.exit_code}"
        if death.exit_code < 0:
            number = signal.Signals(-death.exit_code)
            why = f"was killed by signal {number.value} ({number.name})"
            hint = {
                signal.SIGKILL: "; often the kernel's out-of-memory killer (see dmesg)",
                signal.SIGABRT: "; often a collective that timed out or an assertion in C++",
                signal.SIGBUS: "; often a full /dev/shm or a file truncated while mapped",
            }.get(number, "")
        lines = [f"mlm: rank {death.rank} (pid {death.pid}) {why}{hint}{note}"]
        lines += [failure.text for failure in lost[:1] if failure.names_peer]
        log = log_path(logs, death.rank)
        if last := log.read_text(errors="replace").splitlines()[-10:] if log.exists() else []:
            lines += ["its last lines:", *(f"  {line}" for line in last)]
        return "\n".join(lines), 1
    if lost and lost[0].names_peer:
        unreported = sorted(set(range(world_size)) - recorded - {end.rank for end in ends})
        if unreported:
            folder = f", and in {logs}" if note else ""  # other logs are deleted with the launch
            reason = f"{name_ranks(unreported)} waited for nobody: look there first{folder}"
        else:
            reason = "every rank was waiting, so they disagree about what comes next"
        waits = [failure.text for failure in lost[1 : 1 + MAX_LINES] if not unreported]
        return "\n".join([lost[0].text, *waits, f"mlm: {reason}{note}"]), 1
    if lost:
        return lost[0].text, lost[0].exit_code
    return f"mlm: a rank failed without leaving a trace{note}", 1


def log_path(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank:05d}.log"


def exit_now(code: int) -> NoReturn:
    """End the process now, without destructors that could wait for a peer stuck in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
