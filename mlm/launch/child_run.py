"""Commands as child processes that can be killed with all their ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mlm.launch.environment import import_path
from mlm.launch.stop import LAUNCHED
from mlm.util.errors import CheckFailedError, UserError
from mlm.util.system import die_with_parent

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", LAUNCHED),
)


@contextmanager
def child_run(words: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start `mlm WORDS` on this host, and kill it with all its ranks when the block ends.

    Its output goes to `log`. If this process dies, the kernel kills the command.
    """
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlm", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment_without_launcher(os.environ),
            start_new_session=True,  # Ctrl-C is for the command that started it
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    try:
        yield process
    finally:
        kill(process)


def environment_without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which `mlm` starts its own ranks, with this process's modules."""
    variables = {
        key: value
        for key, value in environ.items()
        if key not in LAUNCHER_VARIABLES and not key.startswith(("SLURM_", "TORCHELASTIC_"))
    }
    return {**variables, "PYTHONPATH": import_path()}


def kill(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL a command and wait for its end. Its ranks die with it (die_with_parent)."""
    process.kill()
    process.wait()


def command_failure(process: "subprocess.Popen[bytes]", name: str, log: Path) -> UserError | None:
    """Return the error of a failed command, with its last line and log; None if it succeeded."""
    code = process.returncode
    if not code:
        return None
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if line.startswith("mlm")] or [line for line in lines if line]
    last = errors[-1][:1000] if errors else "silent"
    outcome = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    kind = UserError if code == UserError.exit_code else CheckFailedError
    return kind(f"{name} {outcome}: {last} (its output: {log})")
