"""Records of steps that are done: one JSON file each, beside its log."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mlm.reproduce.experiment import Step
from mlm.reproduce.results import REMOVE, Record, read_object
from mlm.util.atomic import as_json, write_atomic
from mlm.util.errors import CorruptFileError, UserError

STEPS = "steps"
LARGEST = 1 << 20  # bytes of a record
NAMES = ("words", "code", "seconds", "said", "hardware", "versions")


def record_path(folder: Path, name: str) -> Path:
    """Return the file that remembers a step."""
    return folder / STEPS / f"{name}.json"


def log_path(folder: Path, name: str) -> Path:
    """Return the output of a step."""
    return folder / STEPS / f"{name}.log"


def remember(folder: Path, name: str, record: Record) -> None:
    """Write the record of a step that has ended now. Raises OSError."""
    fields = {**asdict(record), "ended": round(time.time(), 3)}
    write_atomic(record_path(folder, name), as_json(fields))


def read_records(folder: Path, steps: Sequence[Step]) -> dict[str, Record]:
    """Return the records of steps that are done.

    Raises UserError for a step that was done with other words: its result is another one. Raises
    CorruptFileError for a damaged record.
    """
    found = dict[str, Record]()
    for step in steps:
        path = record_path(folder, step.name)
        if not path.is_file():
            continue
        record = _record(path)
        if not (record.code or (folder / step.result).exists()):
            continue
        if record.words != step.words:
            raise UserError(
                f"out={folder}: step {step.name} was done with other settings there "
                f"({_first_difference(record.words, step.words)}); name another out",
                keys=("out",),
            )
        found[step.name] = record
    return found


def _record(path: Path) -> Record:
    """Read a record. Raises CorruptFileError."""
    fields = read_object(path, LARGEST)
    words, code, seconds, said, hardware, versions = map(fields.get, NAMES)
    if not (
        isinstance(words, list)
        and all(isinstance(word, str) for word in words)
        and isinstance(code, int)
        and isinstance(seconds, int | float)
        and isinstance(said, str)
        and isinstance(hardware, str)
        and isinstance(versions, str)
    ):
        raise CorruptFileError(f"{path} is damaged: it needs {', '.join(NAMES)}; {REMOVE}")
    return Record(tuple(words), code, float(seconds), said, hardware, versions)


def _first_difference(words: Sequence[str], now: Sequence[str]) -> str:
    """Return a word that was typed then, and the one in its place now."""
    gone = [word for word in words if word not in now]
    new = [word for word in now if word not in words]
    return f"{gone[0] if gone else 'without'} then, {new[0] if new else 'without it'} now"
