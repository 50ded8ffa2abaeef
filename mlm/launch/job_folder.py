"""The temporary folder of a launch: locked while its command lives, and removed even after SIGKILL.

A killed command cannot remove its folder. The kernel releases its lock (flock), so a later launch can
distinguish its folder from one in use, also if containers share the temporary directory.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlm.util.lock import Lock

PREFIX = "mlm-job-"
HELD = "held"
CODE = "exit-code"
YOUNG_S = 60.0
"""Age below which a folder is left alone: its command may not have locked it yet."""


@contextmanager
def job_folder() -> Iterator[Path]:
    """Make a folder for the files of a launch, and remove what killed launches have left. Raises OSError."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        lock = Lock(Path(name, HELD))
        with suppress(OSError):  # where nothing can be locked, nothing is removed either
            lock.take()
        try:
            yield Path(name)
        finally:
            lock.release()


def remove_abandoned(parent: Path, young_s: float = YOUNG_S) -> None:
    """Remove this user's launch folders that no command holds. Never raises: no launch depends on it."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            said = folder.lstat()
            if said.st_uid != os.getuid() or time.time() - said.st_mtime < young_s:
                continue
            lock = Lock(folder / HELD, create=False)
            if lock.take():  # not while its command lives
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()


def note_exit_code(folder: Path, code: int) -> None:
    """Leave the command's exit code for it: a rank that exits with it would seem to have failed."""
    with suppress(OSError):
        (folder / CODE).write_text(str(code))


def noted_exit_code(folder: Path) -> int:
    """Return the exit code that a rank left; 0 if none did."""
    try:
        return int((folder / CODE).read_text())
    except (OSError, ValueError):
        return 0
