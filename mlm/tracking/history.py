"""metrics.jsonl: one history of a run over all its attempts.

One JSON object per line, each with `kind` (run, step, measured, validation, sample, scores, saved,
save_failed, failed, incident, rewound, diverged, ranks, experts) and `time` (Unix seconds). Numbers that are
not finite are null: JSON has no NaN.
"""

import json
import math
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mlm.tracking.metrics import NO_PARTS, Parts, Sink, StepMetrics, flatten_metrics, name_parts
from mlm.util.errors import UserError
from mlm.util.files import open_bounded, open_regular, read_bounded, write_atomic

FILE_NAME = "metrics.jsonl"
MAX_BYTES = 1 << 30  # a million steps take 300 MB
MOVE = "move it out of the run folder"


class MetricsFile(Sink):
    """Appends each report to `path`, a line at a time: a kill loses at most the line being written.

    Lines of an earlier attempt after `start_step` are deleted first, as those steps are trained again. On a
    full disk training continues: lines wait in memory, and `warn` is called once.
    """

    def __init__(self, path: Path, start_step: int, warn: Callable[[str], None]) -> None:
        self.path = path
        self.start_step = start_step
        self.warn = warn
        self.file: BinaryIO | None = None
        self.is_replaced = False
        """True if `path` may be another file than the open one."""
        self.pending = b""

    def start(self, run: dict[str, object]) -> None:
        """Truncate the file to `start_step` and write the run's record.

        Raises UserError if `path` cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rewind(self.path, self.start_step)
            self.file = self._open()
        except OSError as error:
            raise UserError(
                f"out={self.path.parent}: cannot write {self.path.name}: {error.strerror}. "
                "Free space or permit writing there, or set another out"
            ) from error
        self.append("run", run)

    def step(self, metrics: StepMetrics) -> None:
        self.append("step", flatten_metrics(metrics))

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        self.append("validation", {"step": step, "loss": loss, "perplexity": perplexity, **name_parts(parts)})

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        self.append("scores", {"step": step, "split": split, **metrics, "is_best": is_best})

    def saved(self, step: int, path: Path, seconds: float, waited: float, digest: str | None = None) -> None:
        times = {"seconds": round(seconds, 3), "waited": round(waited, 3)}
        shown = {} if digest is None else {"digest": digest}
        self.append("saved", {"step": step, "path": str(path), **times, **shown})

    def save_failed(self, step: int, error: str) -> None:
        self.append("save_failed", {"step": step, "error": error})

    def measured(self, step: int, values: Parts) -> None:
        # `step` comes first, and wins over a number of that name.
        self.append("measured", {"step": step} | {**values, "step": step})

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        self.append(kind, fields)

    def rewound(self, step: int) -> None:
        self.flush()
        assert self.file is not None, "MetricsFile.start() comes first"
        try:
            # Keep records that explain the rewind.
            rewind(self.path, step, keep=("run", "incident", "rewound"))
        except (OSError, UserError) as error:  # UserError: more than MAX_BYTES
            reason = f"{self.path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            self.warn(f"{reason}; it keeps steps that are trained again")
        self.is_replaced = True

    def _open(self) -> BinaryIO:
        # Unbuffered: a write returns how much reached the file, so that a full disk tears no line.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return open(open_regular(self.path, flags), "ab", buffering=0)

    def append(self, kind: str, fields: Mapping[str, object]) -> None:
        head = {"kind": kind, "time": round(time.time(), 3)}
        record = {**head, **fields, **head}  # an observer's number may use such a name
        self.flush(json.dumps(replace_nonfinite(record), allow_nan=False).encode() + b"\n")

    def flush(self, line: bytes = b"") -> None:
        """Write waiting lines and `line`; keep those that cannot be written."""
        assert self.file is not None, "MetricsFile.start() comes first"
        waited = bool(self.pending)
        self.pending += line
        try:
            if self.pending and self.is_replaced:
                old, self.file, self.is_replaced = self.file, self._open(), False
                old.close()
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending) :]
        except OSError as error:
            if not waited:
                fix = "Free space or permit writing there"
                self.warn(f"{self.path}: {error.strerror}; its lines wait in memory. {fix}")

    def close(self) -> None:
        if self.file is None:
            return
        self.flush()
        if self.pending:
            lines = self.pending.count(b"\n")
            self.warn(f"{self.path}: the last {lines} lines could not be written")
        self.file.close()
        self.file = None


def rewind(path: Path, start_step: int, keep: Container[str] = ()) -> None:
    """Drop the steps after `start_step`, and truncated lines, from a metrics file.

    Records whose `kind` is in `keep` stay. Without `keep`, a start from step 0 begins a new history. Replaces
    the file atomically, and only if it changes.
    """
    if not path.exists():
        return
    old = read_bounded(path, MAX_BYTES, MOVE)
    is_new = start_step == 0 and not keep
    lines = list[bytes]()  # joined once: a million steps have 300 MB
    for line in old.split(b"\n") if not is_new else ():
        record = parse(line)
        if step_of(record) >= 0 and (step_of(record) <= start_step or record["kind"] in keep):
            lines.append(line + b"\n")
    content = b"".join(lines)
    if content != old:
        write_atomic(path, content)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the readable records of a metrics file, in order. Raises OSError."""
    for line in read_lines(path):
        record = parse(line)
        if step_of(record) >= 0:
            yield record


def diverged_since(path: Path) -> int | None:
    """Return the first non-finite step of a diverged run; None for other runs.

    Raises OSError.
    """
    steps = [r.get("since") for r in read_records(path) if r["kind"] == "diverged"] if path.is_file() else []
    return steps[-1] if steps and type(steps[-1]) is int else None


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a metrics file. Raises OSError, CorruptFileError."""
    with open_bounded(path, MAX_BYTES, MOVE) as f:
        while line := f.readline(1 << 24):  # the times of 3,072 ranks take a megabyte
            yield line


def parse(line: bytes) -> dict[str, Any]:
    """Return a line's record; empty for anything but a JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # a truncated line, or no UTF-8
        return {}
    return record if isinstance(record, dict) else {}


def step_of(record: Mapping[str, Any]) -> int:
    """Return the steps done when `record` was written; -1 if unknown, or without `kind`."""
    kind = record.get("kind")
    step = record.get("start_step" if kind == "run" else "step")
    return step if isinstance(kind, str) and type(step) is int else -1


def replace_nonfinite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return value
