"""What macOS lacks of Linux: training, saving and sampling do without it. No Mac was at hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_LINUX = """
import builtins, ctypes, io, mmap, os, select, signal, socket, resource
for module, names in {
    os: "sched_getaffinity sched_setaffinity copy_file_range posix_fadvise posix_fallocate memfd_create "
    "eventfd pidfd_open fdatasync getrandom getxattr setxattr splice pipe2 O_DIRECT O_TMPFILE O_PATH",
    signal: "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGPOLL",
    select: "epoll", mmap: "MADV_HUGEPAGE MADV_DONTFORK MAP_POPULATE", resource: "prlimit RUSAGE_THREAD",
}.items():
    for name in names.split():
        vars(module).pop(name, None)
os.sysconf_names = {name: n for name, n in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
getattr_of, opened, status = ctypes.CDLL.__getattr__, builtins.open, os.stat


def without(self, name):
    if name in ("prctl", "mallopt", "malloc_trim"):
        raise AttributeError(name)
    return getattr_of(self, name)


def hide(function):
    def wrapped(path, *args, **kwargs):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *args, **kwargs)

    return wrapped


ctypes.CDLL.__getattr__ = without
builtins.open = io.open = hide(opened)
os.stat = hide(status)
"""
LINES = [
    "pretrain model=gpt2_tiny data=synthetic tp=2 train.steps=2 train.global_batch_size=8 out=run",
    "pretrain resume=run tp=1 train.steps=3",
    "doctor",
]


@pytest.mark.slow
def test_commands_do_without_what_linux_alone_has(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    for line in LINES:
        words = [sys.executable, "-m", "mlm", *line.split()]
        ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert "Traceback" not in ended.stderr, ended.stderr
        assert ended.returncode == 0 or line == "doctor", ended.stderr
    assert (tmp_path / "run/checkpoints/step-00000003").is_dir()
