"""The typed command line, for the records of a run; the ranks of the command inherit it.

Standard library only, as mlm/launch/stop.py: it is recorded before anything else is imported.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from mlm.launch.stop import LAUNCHED

COMMAND = "MLM_COMMAND"
"""Environment variable with the words after `mlm` and the settings of the job, as JSON."""
LONGEST = 100_000  # characters; Linux takes 128 KiB in a variable


@contextmanager
def record_command_line(words: Sequence[str]) -> Iterator[None]:
    before = os.environ.get(COMMAND)
    _note({"words": list(words)})
    try:
        yield
    finally:
        os.environ.pop(COMMAND, None)
        if before is not None:
            os.environ[COMMAND] = before


def record_job(settings: Sequence[str]) -> None:
    if noted := _noted():
        _note({"words": noted["words"], "settings": list(settings)})


def typed_settings() -> list[str]:
    """Settings of the running job, as words: `model.num_layers=6`, `--config-dir=mine`."""
    return list(_noted().get("settings", []))


def run_origin() -> dict[str, Any]:
    """Return command (unless a program calls the library), folder, host and launcher of a run."""
    noted, origin = _noted(), dict[str, Any]()
    if noted:
        origin["command"] = ["mlm", *noted["words"]]
    with suppress(OSError):  # the working directory was deleted
        origin["folder"] = os.getcwd()
    origin["host"] = socket.gethostname()
    if slurm := os.environ.get("SLURM_JOB_ID"):
        origin["launcher"] = f"SLURM job {slurm}"
    elif "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHED not in os.environ:
        origin["launcher"] = "torchrun"
    return origin


def _note(values: Mapping[str, Any]) -> None:
    text = json.dumps(values)
    if len(text) <= LONGEST:
        os.environ[COMMAND] = text
    else:
        os.environ.pop(COMMAND, None)


def _noted() -> dict[str, Any]:
    try:
        noted = json.loads(os.environ.get(COMMAND, ""))
    except (ValueError, RecursionError):
        return {}
    return noted if isinstance(noted, dict) and "words" in noted else {}
