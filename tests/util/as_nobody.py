"""A test's work as another user, for what root may do and users may not."""

import os
import stat
import tempfile
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
    """The result of `work`, 0 to 200, in a process of the user nobody where this one is root's."""
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
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
