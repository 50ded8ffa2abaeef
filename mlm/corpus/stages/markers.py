"""Markers of finished tasks, with their counts and the digests of their files, and progress of running ones.

The marker is written last and atomically: where it is, the files are complete.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlm.util.atomic import digest_file, write_atomic

MAX_MARKER_BYTES = 1 << 26
INTERVAL_S = 0.3  # between two writes of a task's progress

Counts = dict[str, Any]


def marker_path(folder: Path, task: int) -> Path:
    """Path of the marker of a task."""
    return folder / f"{task:05d}.done.json"


def write_marker(folder: Path, task: int, counts: Counts, files: Sequence[Path]) -> None:
    """Mark a task as done. Raises OSError."""
    entries = {file.name: [file.stat().st_size, digest_file(file)] for file in files}
    content = {"counts": counts, "files": entries}
    write_atomic(marker_path(folder, task), json.dumps(content).encode())
    progress_path(folder, task).unlink(missing_ok=True)


def read_marker(folder: Path, task: int) -> dict[str, Any] | None:
    """Return the marker of a task, None while it is not done or if the marker is damaged."""
    path = marker_path(folder, task)
    try:
        if path.stat().st_size > MAX_MARKER_BYTES:
            return None
        marker = json.loads(path.read_bytes())
        return marker if isinstance(marker["counts"], dict) and isinstance(marker["files"], dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def counts_of(folder: Path, tasks: int) -> list[Counts]:
    """Return the counts of all tasks of a finished stage."""
    markers = [read_marker(folder, task) for task in range(tasks)]
    assert all(markers), f"{folder} is not done"
    return [marker["counts"] for marker in markers if marker]


def is_done(folder: Path, task: int) -> bool:
    """True if a task has left its marker."""
    return marker_path(folder, task).exists()


def withdraw_if_damaged(folder: Path, task: int) -> bool:
    """Delete the marker of a task whose files differ from it, so that the task runs again.

    Reads the files whole. Returns True if the marker is kept.
    """
    marker = read_marker(folder, task)
    if marker is not None and all(
        Path(name).name == name
        and (folder / name).is_file()
        and [(folder / name).stat().st_size, digest_file(folder / name)] == entry
        for name, entry in marker["files"].items()
    ):
        return True
    marker_path(folder, task).unlink(missing_ok=True)
    return False


def progress_path(folder: Path, task: int) -> Path:
    """Path of a running task's progress."""
    return folder / f".{task:05d}.progress"


class Advance:
    """Counter of the units a task has done, written now and then to a file that any machine can read."""

    def __init__(self, folder: Path, task: int) -> None:
        self.path, self.units, self.written = progress_path(folder, task), 0, 0.0

    def __call__(self, units: int) -> None:
        """Add units done; write them now and then."""
        self.units += units
        now = time.monotonic()
        if now - self.written >= INTERVAL_S:
            self.written = now
            self.path.write_text(str(self.units))


class UnitsDone:
    """Units that all tasks of a stage have done so far. A finished task is not read again."""

    def __init__(self, folder: Path, totals: Sequence[int]) -> None:
        self.folder, self.totals = folder, totals
        self.done, self.left = 0, list(range(len(totals)))

    def __call__(self) -> int:
        """Count the units done."""
        running, left = 0, list[int]()
        for task in self.left:
            if is_done(self.folder, task):
                self.done += self.totals[task]
                continue
            left.append(task)
            try:
                running += min(self.totals[task], int(progress_path(self.folder, task).read_text() or 0))
            except (OSError, ValueError):  # not started, or read while it was written
                continue
        self.left = left
        return self.done + running
