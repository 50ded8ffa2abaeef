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
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def host_memory() -> int:
    """Bytes of memory of this host, or its container's limit."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_bytes("memory.max")
    return most if limit is None else min(most, limit)


def available_memory() -> int:
    """Free bytes of memory of this host, or within its container's limit."""
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    for line in MEMINFO.read_text().splitlines() if MEMINFO.exists() else ():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _cgroup_bytes(name: str) -> int | None:
    """Value of this process's cgroup; None without a container or a limit."""
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


POLL_S = 0.02


def poll(timeout_s: float, longest_s: float = 0.25) -> Iterator[float]:
    """Yield the remaining seconds, at least once, with growing pauses until `timeout_s` has passed."""
    end, pause = time.monotonic() + timeout_s, POLL_S
    while True:
        yield end - time.monotonic()
        if time.monotonic() + pause >= end:
            return
        time.sleep(pause)
        pause = min(1.5 * pause, longest_s)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends, even by SIGKILL.

    Linux only.
    """
    pr_set_pdeathsig, library = 1, ctypes.CDLL(None, use_errno=True)  # linux/prctl.h
    if hasattr(library, "prctl"):
        library.prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died earlier
        os._exit(1)


class LastingStream:
    """A text stream whose loss does not end the program: `| head` has exited, the disk is full.

    Later output is dropped, with one line on stderr; without it if `reader_may_leave` and a pipe was closed.
    """

    stream: TextIO

    def __init__(self, stream: TextIO, consequence: str, *, reader_may_leave: bool = False) -> None:
        # Unwrap: the newest wrapper names the consequence.
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
        with suppress(OSError, ValueError):  # buffered text would fail at exit
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
    """Make standard streams accept every text while inside; yield standard output."""
    before = sys.stdout, sys.stderr
    # A stream closed before the start (`>&-`) is None; a later file could get its descriptor.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Write characters that the encoding lacks as `\u2026` instead of raising an error.
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
"""Warnings printed so far."""


def warn_once(printed: Iterable[str] = (), *, is_heard: bool = True) -> None:
    """Print each warning of a command once, though checks and the run repeat it.

    `printed`: warnings that the parent process has printed. Without `is_heard` (later ranks of a host) none.
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
    """The function that an import string names: `mlm.cli.evaluate.loss:run`."""
    path, _, name = target.partition(":")
    if path not in sys.modules:
        # Garbage collections during the import of torch, and of its objects later, find nothing and take a
        # tenth of the import's time.
        was_on = gc.isenabled()
        gc.disable()
        try:
            import_module(path)
        finally:
            gc.freeze()
            if was_on:
                gc.enable()
    return getattr(sys.modules[path], name)
