"""The command line that the user typed, for the records of a run. The ranks that it starts inherit it.

Standard library only, as mlm/launch/stop.py: it is noted before anything else is imported.
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
    """Note the settings of the job that runs, as words."""
    if noted := _noted(os.environ):
        _note({"words": noted["words"], "settings": list(settings)})


def typed_settings() -> list[str]:
    """Return the settings of the job that runs as words: `model.num_layers=6`, `--config-dir=own`."""
    return list(_noted(os.environ).get("settings", []))


def run_origin(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return command (words), folder, host and launcher of a run, for its record.

    The command is left out where it is unknown, as in a program that calls the library.
    """
    environ = os.environ if environ is None else environ
    noted, known = _noted(environ), dict[str, Any]()
    if noted:
        known["command"] = ["mlm", *noted["words"]]
    with suppress(OSError):  # the working directory was deleted
        known["folder"] = os.getcwd()
    known["host"] = socket.gethostname()
    if slurm := environ.get("SLURM_JOB_ID"):
        known["launcher"] = f"SLURM job {slurm}"
    elif "TORCHELASTIC_RUN_ID" in environ and LAUNCHED not in environ:  # a plain command has the same agent
        known["launcher"] = "torchrun"
    return known


def _note(values: Mapping[str, Any]) -> None:
    text = json.dumps(values)
    if len(text) <= LONGEST:
        os.environ[COMMAND] = text
    else:
        os.environ.pop(COMMAND, None)


def _noted(environ: Mapping[str, str]) -> dict[str, Any]:
    try:
        noted = json.loads(environ.get(COMMAND, ""))
    except (ValueError, RecursionError):
        return {}
    return noted if isinstance(noted, dict) and "words" in noted else {}
