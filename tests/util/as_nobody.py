"""A test's work as another user, for what root may do and users may not."""

import importlib
import os
import stat
import tempfile
from collections.abc import Iterator
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


@contextmanager
def as_nobody() -> Iterator[None]:
    """Within, this process is the user nobody's where it is root's.

    It is no forked one: threads of PyTorch may hold locks that a child would wait for.
    """
    if os.geteuid() != 0:
        yield
        return
    group, groups = os.getgid(), os.getgroups()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, group)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(group, group, group)
        os.setgroups(groups)
        importlib.invalidate_caches()  # of folders that nobody may not list
