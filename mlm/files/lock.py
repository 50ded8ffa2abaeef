"""One writer per folder of checkpoints: two runs in one folder would delete each other's work.

The kernel holds the lock (flock) and gives it back when its process dies, however it dies: nothing is stale
after a crash. It holds across hosts where the shared file system supports it (NFS 4, GPFS, Lustre mounted
with flock); where it does not, a warning says so and nothing is locked.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlm.errors import UserError
from mlm.files.atomic import open_lock

log = logging.getLogger(__name__)

LOCK = ".lock"
WAIT_S = 10.0
"""A run that is started again may meet the last breaths of the one that was killed."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def sole_writer(folder: Path, *, wait_s: float = WAIT_S, setting: str = "out") -> Iterator[None]:
    """Be the only one who writes checkpoints in `folder` (made if it is not there) while inside.

    Raises UserError, after `wait_s` seconds, when another process has it: the message names host and process;
    and when the folder cannot be written. `setting` is what named the folder, for messages.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = open_lock(folder / LOCK)
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}: make it writable, or set {setting}=… to a folder that is"
        ) from error
    try:
        _take(descriptor, folder, wait_s, setting)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: Path, wait_s: float, setting: str) -> None:
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in UNSUPPORTED:
                log.warning("%s cannot be locked here: let no two runs write to it at once", folder)
                return
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise UserError(
                    f"{folder / LOCK}: {error.strerror} when locking it: check the disk, or set {setting}=… "
                    "to a folder on another"
                ) from error
        if time.monotonic() >= end:
            raise UserError(
                f"{folder}: in use by {_holder(descriptor)}. Stop that first, or set {setting}=… to another "
                "folder"
            )
        time.sleep(0.1)
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
    with suppress(OSError):  # a full disk takes no note, but the lock is held, and pruning is the cure
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(mine).encode(), 0)


def _holder(descriptor: int) -> str:
    """Who wrote the lock file, for the message."""
    try:
        said = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {int(said['pid'])} on {said['host']} since {said['since']}"
    except (ValueError, TypeError, KeyError):
        return "another process"
