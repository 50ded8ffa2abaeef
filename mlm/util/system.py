"""This process and its host: memory and cores, the parent, and standard streams.

Standard library only: a launched rank needs it before it imports torch.
"""

import ctypes
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def host_memory() -> int:
    """Bytes of memory that this host's programs can have: the machine's, or less in a container."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_bytes("memory.max")
    return most if limit is None else min(most, limit)


def available_memory() -> int:
    """Bytes of memory that this host's programs can still have, or less in a container."""
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    for line in MEMINFO.read_text().splitlines() if MEMINFO.exists() else ():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _cgroup_bytes(name: str) -> int | None:
    """Value of this process's container; None without a container or a limit."""
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends, even by SIGKILL.

    Linux alone does.
    """
    pr_set_pdeathsig, library = 1, ctypes.CDLL(None, use_errno=True)  # linux/prctl.h
    if hasattr(library, "prctl"):
        library.prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


class LastingStream:
    """A text stream whose loss does not end the program: `| head` has left, `tee` is dead, the disk is full.

    What cannot be written is dropped from then on, and a line on stderr says so; none where the reader of a
    pipe has left and `reader_may_leave`.
    """

    stream: TextIO

    def __init__(self, stream: TextIO, consequence: str, *, reader_may_leave: bool = False) -> None:
        # The newest of several names what is lost.
        inner: TextIO = stream.stream if isinstance(stream, LastingStream) else stream
        self.stream, self.consequence, self.reader_may_leave = inner, consequence, reader_may_leave
        self.is_lost = self.has_failed = False

    def write(self, text: str) -> int:
        if not self.is_lost:
            try:
                return self.stream.write(text)
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if not self.is_lost:
            try:
                self.stream.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.is_lost = True
        self.has_failed = not (self.reader_may_leave and error.errno == errno.EPIPE)
        with suppress(OSError, ValueError):  # what is still buffered would fail at exit
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.stream.fileno())
            os.close(devnull)
        if self.has_failed:
            with suppress(OSError):
                os.write(2, f"mlm: standard output: {error.strerror}; {self.consequence}\n".encode())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def writable_streams() -> Iterator[LastingStream]:
    """Standard streams that take every text while inside; yields standard output."""
    before = sys.stdout, sys.stderr
    # Python has None for a stream that was closed before it started (`>&-`); a low descriptor is reused.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # characters that the encoding lacks are written as `\u2026` instead of raising an error
        reconfigure = getattr(stream, "reconfigure", None)
        encoding, errors = getattr(stream, "encoding", None) or "", getattr(stream, "errors", None)
        is_lossless = errors == "surrogateescape" and encoding.lower() in ("utf-8", "utf8")
        if reconfigure and errors in ("strict", "surrogateescape") and not is_lossless:
            reconfigure(errors="backslashreplace")
    output = LastingStream(sys.stdout, "what follows is not shown", reader_may_leave=True)
    sys.stdout = output
    try:
        yield output
    finally:
        output.flush()
        sys.stdout, sys.stderr = before


WARNED = set[str]()
"""Texts of the warnings of a command so far."""


def warn_once(printed: Iterable[str] = (), *, is_heard: bool = True) -> None:
    """Print each warning of a command once: its checks, and the run, come upon the same.

    `printed` are texts that another process of it has printed. One that is not heard, as it has the same to
    say as the first rank of its host, prints none.
    """
    WARNED.clear()
    WARNED.update(printed)
    if (handler := logging.lastResort) is not None:
        handler.addFilter(_is_new if is_heard else lambda record: False)


def _is_new(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    is_new = text not in WARNED
    WARNED.add(text)
    return is_new


def resolve(target: str) -> Any:
    """The function that an import string names: `mlm.evaluate.loss:run`."""
    path, _, name = target.partition(":")
    if path not in sys.modules:
        # Python would look through the hundred thousands of objects of torch ten times while they are
        # defined, and again whenever a quarter more has come: a tenth of what the imports take.
        was_on = gc.isenabled()
        gc.disable()
        try:
            import_module(path)
        finally:
            gc.freeze()
            if was_on:
                gc.enable()
    return getattr(sys.modules[path], name)
