"""One process at a time for what need be made only once on a file system."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlm.files.atomic import open_lock

WAIT_S = 600.0
POLL_S = 0.05


@contextmanager
def one_builder(path: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """While inside, no other process is inside for the same `path`: ranks and other runs wait for this one.

    The kernel holds the lock (flock), across hosts where the file system does, and takes it back from a
    process that dies. It saves work and nothing depends on it: where there is no lock to be had (a read-only
    folder, a file system without flock), or none for `wait_s` seconds (a holder that was stopped), all go in.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _take(lock, time.monotonic() + wait_s)
    except OSError:
        descriptor = None
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                lock.unlink()  # while it is held: `_take` believes in no file but the one there now
            os.close(descriptor)


def _take(lock: Path, until: float) -> int | None:
    """A descriptor that holds the lock, None if none was to be had in time. Raises OSError."""
    while time.monotonic() < until:
        descriptor = open_lock(lock)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # held by another, or gone with the one who held it
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(POLL_S)
    return None
