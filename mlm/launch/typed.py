"""The command line that the user typed, for the records of a run. The ranks that it starts inherit it.

Standard library only, as mlm/launch/stop.py: it is noted before anything else is imported.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlm.launch.stop import LAUNCHED

COMMAND = "MLM_COMMAND"
"""Environment variable with the command line, as JSON."""
LONGEST = 100_000  # characters; Linux takes 128 KiB in a variable
PROGRAM = ("mlm",)
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@contextmanager
def typed_as(words: Sequence[str]) -> Iterator[None]:
    """Note the words after `mlm`, with the words that started it, for this process and those it starts."""
    before = os.environ.get(COMMAND)
    _note({"program": started_with(words), "words": list(words)})
    try:
        yield
    finally:
        os.environ.pop(COMMAND, None)
        if before is not None:
            os.environ[COMMAND] = before


def note_job(overrides: str) -> None:
    """Note which job of a sweep runs, by what it varies."""
    if found := _noted(os.environ):
        _note({**found, "job": overrides})


def program() -> list[str]:
    """The words that started `mlm`, with those of torchrun if it did."""
    return list(_noted(os.environ).get("program", PROGRAM))


def origin(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return command (words), job (of a sweep), folder, host and launcher of a run, for its record.

    Command and job are left out where they are unknown, as in a program that calls the library.
    """
    environ = os.environ if environ is None else environ
    found, known = _noted(environ), dict[str, Any]()
    if found:
        known["command"] = [*found["program"], *found["words"]]
    if found.get("job"):
        known["job"] = found["job"]
    with suppress(OSError):  # the working directory was deleted
        known["folder"] = os.getcwd()
    launcher = "torchrun" if _by_torchrun(environ) else None
    if slurm := environ.get("SLURM_JOB_ID"):
        launcher = f"SLURM job {slurm}"
    return {**known, "host": socket.gethostname(), **({"launcher": launcher} if launcher else {})}


def started_with(words: Sequence[str]) -> list[str]:
    """Return the words before those of the command: mlm, python -m mlm, torchrun … -m mlm."""
    if _by_torchrun(os.environ):
        with suppress(OSError):
            parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if found := torchrun_words([os.fsdecode(word) for word in parent], words):
                return found
    line = sys.orig_argv
    if line[-len(words) - 2 :] == ["-m", PROGRAM[0], *words]:
        return line[: len(line) - len(words)]
    return list(PROGRAM)


def torchrun_words(parent: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return torchrun's own words from its process's command line, empty if that is none of it."""
    end = len(parent) - len(words)
    at = next((n for n, word in enumerate(parent) if os.path.basename(word) in TORCHRUN), None)
    if at is None or at >= end or list(parent[end:]) != list(words):
        return []
    name = os.path.basename(parent[at])
    return [*([name] if name == TORCHRUN[0] else ["python", "-m", name]), *parent[at + 1 : end]]


def _by_torchrun(environ: Mapping[str, str]) -> bool:
    """True in a rank that torchrun started, not a plain `mlm` command with the same agent."""
    return "TORCHELASTIC_RUN_ID" in environ and LAUNCHED not in environ


def _note(found: Mapping[str, Any]) -> None:
    text = json.dumps(found)
    if len(text) <= LONGEST:
        os.environ[COMMAND] = text
    else:
        os.environ.pop(COMMAND, None)


def _noted(environ: Mapping[str, str]) -> dict[str, Any]:
    try:
        found = json.loads(environ.get(COMMAND, ""))
    except (ValueError, RecursionError):
        return {}
    is_ours = isinstance(found, dict) and {"program", "words"} <= found.keys()
    return found if is_ours else {}
