"""A test's work as another user, for what root may do and users may not."""

import os
import signal
import stat
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

NOBODY = 65534


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that every user can enter: pytest's are for one alone."""
    folder = Path(tempfile.mkdtemp(prefix="mlm-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            path.chmod(path.stat().st_mode | stat.S_IRWXU)
        rmtree(folder)


def as_nobody(work: Callable[[], int]) -> int:
    """The result of `work`, 0 to 200, in a process of the user nobody where this one is root's.

    A lock that another thread holds at a fork stays held in the child: one that hangs is forked anew.
    """
    for _ in range(3):
        child = _fork(work)
        for _ in range(600):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    raise TimeoutError("three children hung")


def _fork(work: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os._exit(work())
        except BaseException:
            traceback.print_exc()
            os._exit(201)
    return child
