"""What is remembered of steps that are done: one JSON file each, beside its log."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlm.errors import UserError
from mlm.files.atomic import write_atomic
from mlm.files.bounded import as_json, parse_json, read_bounded
from mlm.reproduce.experiment import Step
from mlm.reproduce.results import Record

STEPS = "steps"
LARGEST = 1 << 20  # bytes of a record
REMOVE = "delete it, and the step runs again"


def record_path(folder: Path, name: str) -> Path:
    """Return the file that remembers a step."""
    return folder / STEPS / f"{name}.json"


def log_path(folder: Path, name: str) -> Path:
    """Return the output of a step."""
    return folder / STEPS / f"{name}.log"


def remember(folder: Path, step: Step, record: Record, facts: Mapping[str, object]) -> None:
    """Write the record of a step that has ended. Raises OSError."""
    write_atomic(record_path(folder, step.name), as_json({**asdict(record), **facts}))


def read_records(folder: Path, steps: Sequence[Step]) -> dict[str, Record]:
    """Return the records of steps that are done.

    Raises UserError for a step that was done with other words: its result is another one.
    """
    found = dict[str, Record]()
    for step in steps:
        path = record_path(folder, step.name)
        fields = _fields(path) if path.is_file() else {}
        if not fields or not (fields.get("code") or (folder / step.result).exists()):
            continue
        words = tuple(map(str, fields.get("words", ())))
        if words != step.words:
            raise UserError(
                f"out={folder}: step {step.name} was done with other settings there "
                f"({_first_difference(words, step.words)}); name another out",
                keys=("out",),
            )
        found[step.name] = Record(
            words=words,
            code=int(fields.get("code", 0)),
            seconds=float(fields.get("seconds", 0.0)),
            said=str(fields.get("said", "")),
        )
    return found


def _fields(path: Path) -> dict[str, Any]:
    """Return a record's fields. Raises UserError for a damaged file."""
    try:
        found = parse_json(read_bounded(path, LARGEST, REMOVE))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {REMOVE}") from error
    return found if isinstance(found, dict) else {}


def _first_difference(words: Sequence[str], now: Sequence[str]) -> str:
    """Return a word that was typed then, and the one in its place now."""
    gone = [word for word in words if word not in now]
    new = [word for word in now if word not in words]
    return f"{gone[0] if gone else 'without'} then, {new[0] if new else 'without it'} now"
