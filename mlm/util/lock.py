"""Locks between processes: one writer per folder, one builder per file, temporary folders in use.

The kernel holds a lock (flock) and releases it when its process dies, however it dies: nothing is stale after
a crash. It holds across hosts where the shared file system supports it (NFS 4, GPFS, Lustre mounted with
flock). Its descriptor is closed in programs that this one starts, so that none keeps the lock.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlm.util.errors import UserError
from mlm.util.files import open_regular

log = logging.getLogger(__name__)

LOCK = ".lock"
HELD = "held"
"""Lock of a temporary folder."""
WAIT_S = 10.0
"""Seconds in which a killed run may still be ending when it is restarted."""
TAKEN = (errno.EAGAIN, errno.EACCES)
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class LockError(OSError):
    """The file exists, but the file system cannot lock it."""


class Lock:
    """An exclusive lock on a file. Links are not followed.

    Args:
        path: the file, made by `take` unless `create` is false.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        self._flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self._descriptor: int | None = None

    def take(self, wait_s: float = 0.0) -> bool:
        """Take the lock; return False if another process still holds it after `wait_s` seconds.

        Raises LockError, and OSError for a file that cannot be opened.
        """
        deadline = time.monotonic() + wait_s
        while True:
            descriptor = open_regular(self.path, self._flags)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last holder may have deleted the file: then lock the new one.
                if os.path.samestat(os.fstat(descriptor), os.lstat(self.path)):
                    self._descriptor, descriptor = descriptor, -1
                    return True
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in TAKEN:
                    raise LockError(error.errno, error.strerror, str(self.path)) from error
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.05)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def is_held(self) -> bool:
        """True if a process holds the lock; False if the file is absent, unreadable or cannot be locked."""
        with suppress(OSError):
            descriptor = open_regular(self.path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return error.errno in TAKEN
            finally:
                os.close(descriptor)
        return False

    def release(self, *, delete: bool = False) -> None:
        """Release the lock, if it is held; with `delete` first remove the file."""
        if self._descriptor is None:
            return
        if delete:
            with suppress(OSError):
                self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def sign(self) -> None:
        assert self._descriptor is not None
        note = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
        with suppress(OSError):  # a full disk: the lock holds without a note
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(note).encode(), 0)

    def holder(self) -> str:
        note = self.note()
        return "process {pid} on {host} since {since}".format(**note) if note else "another process"

    def note(self) -> dict[str, str | int]:
        """Return host, pid and since as `sign` wrote them; empty if unreadable."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            descriptor = open_regular(self.path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                note = json.loads(os.pread(descriptor, 1000, 0))
            finally:
                os.close(descriptor)
            return {"host": str(note["host"]), "pid": int(note["pid"]), "since": str(note["since"])}
        return {}


@contextmanager
def single_writer(
    folder: Path, *, wait_s: float = WAIT_S, setting: str = "out", is_trial: bool = False
) -> Iterator[None]:
    """Be the only process that writes checkpoints in `folder` (made if absent) while inside.

    On a file system that cannot lock, warn and lock nothing. `setting`: the key of the folder. A trial writes
    nothing. Raises UserError if another process holds the lock after `wait_s` seconds, or the folder is not
    writable.
    """
    lock = Lock(folder / LOCK, create=not is_trial)
    is_free = is_trial and not lock.path.exists()
    try:
        if is_free:
            # The folder, or its nearest existing parent.
            existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if not os.access(existing, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))
        else:
            folder.mkdir(parents=True, exist_ok=True)
        is_held = is_free or lock.take(wait_s)
    except LockError as error:
        if error.errno not in UNSUPPORTED:
            raise UserError(
                f"{lock.path}: {error.strerror} when locking it: check the disk, or set {setting}=… to a "
                "folder on another"
            ) from error
        log.warning("%s cannot be locked here: let no two runs write to it at once", folder)
    except FileNotFoundError as error:  # the last writer deleted a temporary folder
        problem = f"{folder}: another process has ended here and deleted it"
        raise UserError(f"{problem}; set {setting}=… to another folder, or run this again") from error
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}: make it writable, or set {setting}=… to a folder that is"
        ) from error
    else:
        if not is_held:
            raise UserError(
                f"{folder}: in use by {lock.holder()}. Stop that first, or set {setting}=… to another folder"
            )
        if not is_trial:
            lock.sign()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def single_builder(path: Path, wait_s: float = 600.0) -> Iterator[None]:
    """Let one process at a time make the file `path`: ranks and other runs wait for it.

    It only saves work: without a lock (a read-only folder, no flock), or after `wait_s` seconds (a stopped
    holder), all processes enter.
    """
    lock = Lock(path.with_name(f".{path.name}.lock"))
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.take(wait_s)
    try:
        yield
    finally:
        lock.release(delete=True)


@contextmanager
def held_folder(folder: Path) -> Iterator[Path]:
    """Lock a new temporary folder while inside, and delete it at the end. Raises OSError.

    A killed process cannot delete its folder, but the kernel releases its lock: the next `remove_abandoned`
    there deletes the folder.
    """
    lock = Lock(folder / HELD)
    try:
        with suppress(OSError):  # without flock `remove_abandoned` removes nothing
            if lock.take():
                lock.sign()
        yield folder
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path, pattern: str) -> None:
    """Delete this user's temporary folders whose process has ended. Never raises.

    Locks may not hold across hosts, so folders of another host stay for an hour.
    """
    for folder in parent.glob(pattern):
        with suppress(OSError):
            status, lock = folder.lstat(), Lock(folder / HELD, create=False)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            is_old = time.time() - status.st_mtime > 3600
            is_local = lock.path.exists() and lock.note().get("host") == socket.gethostname()
            if (is_old or is_local) and (not lock.path.exists() or lock.take()):
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
