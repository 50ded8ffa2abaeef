"""A training run as a command of its own, which can be killed whole: `mlm verify-resume` needs that."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from mlm.errors import CheckFailedError, UserError
from mlm.launch.environment import import_path
from mlm.launch.rank import die_with_parent
from mlm.launch.stop import LAUNCHED

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", LAUNCHED),
)
LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_")
GONE_S = 30.0  # a killed process may first have to finish a write to a slow disk
LONGEST_LINE = 1000  # characters of a log that an error repeats


@contextmanager
def child_run(words: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start `mlm WORDS` plainly on this host, its output in `log`; however the block ends, nothing of it is
    left running. Should this process die itself, the kernel kills the command."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlm", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=plain_environment(os.environ),
            start_new_session=True,  # Ctrl-C is for the command that started it
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    try:
        yield process
    finally:
        kill(process)


def plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which `mlm` starts its own ranks, with this process's modules."""
    kept = {
        key: value
        for key, value in environ.items()
        if key not in LAUNCHER_VARIABLES and not key.startswith(LAUNCHER_PREFIXES)
    }
    return {**kept, "PYTHONPATH": import_path()}


def kill(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL a command and all that it started, and return when nothing of it is left."""
    family = {} if process.poll() is not None else {pid: _birth(pid) for pid in _descendants(process.pid)}
    process.kill()  # the ranks follow it by themselves (die_with_parent)
    for pid, birth in family.items():
        if birth and _birth(pid) == birth:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + GONE_S
    while time.monotonic() < end and any(birth and _birth(pid) == birth for pid, birth in family.items()):
        time.sleep(0.01)


def failure_of(process: "subprocess.Popen[bytes]", what: str, log: Path) -> UserError | None:
    """What to tell of a command that did not end well: its own last line, and where the others are."""
    code = process.returncode
    if not code:
        return None
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = (
        [line for line in lines if line.startswith("mlm")] or [line for line in lines if line] or ["silent"]
    )
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    kind = UserError if code == UserError.exit_code else CheckFailedError
    return kind(f"{what} {how}: {said[-1][:LONGEST_LINE]} (all it said: {log})")


def _descendants(root: int) -> list[int]:
    """Processes that `root` started, and those that they started."""
    parents = {int(entry): _stat(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal()}
    found = [root]
    for pid in found:  # grows under way
        found += [child for child, stat in parents.items() if stat and int(stat[1]) == pid]
    return found[1:]


def _birth(pid: int) -> str | None:
    """When a process began, in the kernel's ticks, None if it is gone: tells it from a later one of its
    number."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else stat[19]


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the third field on: state, parent, … (man 5 proc); the name before may hold
    anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
