"""The temporary folder of a launch: locked while its command lives, and removed even after SIGKILL.

A killed command cannot remove its folder. The kernel releases its lock (flock), so a later launch tells such
a folder from one in use, also if containers share the temporary directory.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "mlm-job-"
HELD = "held"
YOUNG_S = 60.0
"""Age below which a folder is left alone: its command may not have locked it yet."""


@contextmanager
def job_folder() -> Iterator[Path]:
    """Make a folder for the files of a launch, and remove what killed launches have left. Raises OSError."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        descriptor = os.open(Path(name, HELD), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # where nothing can be locked, nothing is removed either
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(descriptor)


def remove_abandoned(parent: Path, young_s: float = YOUNG_S) -> None:
    """Remove this user's launch folders that no command holds. Never raises: no launch depends on it."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            said = folder.lstat()
            if said.st_uid != os.getuid() or time.time() - said.st_mtime < young_s:
                continue
            descriptor = os.open(folder / HELD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its command lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
