"""The folder of an examination's trial: locked while its rank 0 lives, and removed even if that was killed.

The kernel releases the lock of a killed process. Across hosts a file system may not lock, so that another
host's trial counts as over only after an hour.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlm.launch.doctor.config import DoctorConfig
from mlm.util.lock import Lock
from mlm.util.results import is_stream

ABANDONED_S = 3600.0
"""Age from which the folder of a trial belongs to nobody."""
MARK = ".mlm-doctor"
HELD = "held"
OWN = ("rank-*", "disk-*", "speed-*", "first", "lock", HELD, ".*.partial")
"""Files of a trial."""


def folder_of(config: DoctorConfig) -> Path:
    """Return the folder whose disk is checked."""
    return Path.cwd() if config.out is None or is_stream(config.out) else Path(config.out).absolute().parent


@contextmanager
def trial_folder(work: Path) -> Iterator[None]:
    """Make a folder for a trial, and remove it; first those that nobody holds. Raises OSError."""
    remove_abandoned(work.parent)
    work.mkdir(parents=True)
    lock = Lock(work / HELD)
    try:
        with suppress(OSError):  # not every disk locks: a check of its own
            if lock.take():
                lock.sign()
        yield
    finally:
        lock.release()
        _remove(work)


def tidy(config: DoctorConfig) -> None:
    """Remove the folder of a trial whose ranks were killed, as by Ctrl-C."""
    remove_abandoned(folder_of(config))


def remove_abandoned(folder: Path) -> None:
    """Remove the folders of trials that nobody holds. Never raises: no examination depends on it."""
    for work in folder.glob(f"{MARK}-{'[0-9a-f]' * 32}/"):
        with suppress(OSError):
            if not work.is_symlink() and (_is_old(work) or _is_free(work)):
                _remove(work)


def _is_old(work: Path) -> bool:
    return time.time() - work.lstat().st_mtime > ABANDONED_S


def _is_free(work: Path) -> bool:
    """True if a process of this host held the folder, and ended. Raises OSError."""
    lock = Lock(work / HELD, create=False)
    try:
        return lock.is_signed_here() and lock.take()
    finally:
        lock.release()


def _remove(work: Path) -> None:
    """Delete the files of a trial, and its folder if nothing else is in it."""
    with suppress(OSError):
        for path in (path for name in OWN for path in work.glob(name)):
            path.unlink(missing_ok=True)
        work.rmdir()
