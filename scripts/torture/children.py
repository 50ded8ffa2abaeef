"""Jobs in forked children: torch is imported once. They tell when a save or a load begins, and can be killed.

A job of several ranks is started as torchrun would start it.
"""

import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine import free_port

from mlm.cli.pretrain import run as pretrain
from mlm.training import resume, saver
from mlm.util import lock
from mlm.util.system import die_with_parent

HUNG_S = 120.0
HUNG = 124  # exit code of what took longer, as timeout(1) has it
SAVE, LOAD, RESHARD = "S", "L", "R"
"""Written by a job to its pipe as one begins; in lower case as it ends."""
NOBODY = 65534


@dataclass
class Job:
    """Forked children that work together."""

    pids: list[int]
    pipe: int
    log: Path
    heard: str = ""
    """Messages received so far."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit code of each child that has ended; minus the signal if one ended it."""

    def wait_for(self, letter: str, count: int = 1) -> bool:
        """Until the `count`-th `letter` was told; False if the job ended before."""
        end = time.monotonic() + HUNG_S
        while self.heard.count(letter) < count:
            if not select.select([self.pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
            if not (said := os.read(self.pipe, 100)):
                return False
            self.heard += said.decode()
        return True

    def drain(self) -> str:
        """All it has told."""
        while select.select([self.pipe], [], [], 0)[0] and (said := os.read(self.pipe, 100)):
            self.heard += said.decode()
        return self.heard

    def kill(self, pids: Sequence[int] | None = None) -> None:
        """SIGKILL its children, or some of them."""
        for pid in pids or self.pids:
            if pid not in self.codes:
                os.kill(pid, signal.SIGKILL)

    def is_over(self) -> bool:
        """True if all its children have ended."""
        for pid in self.pids:
            if pid not in self.codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def end(self, between: Callable[[], None] = lambda: None) -> int:
        """Wait for it; the first exit code that is not 0, or HUNG, after it was killed for taking so long."""
        end = time.monotonic() + HUNG_S
        while not (over := self.is_over()) and time.monotonic() < end:
            between()
            time.sleep(0.002)
        if not over:
            self.kill()
            while not self.is_over():
                time.sleep(0.002)
        self.drain()
        os.close(self.pipe)
        return next((code for code in self.codes.values() if code), 0) if over else HUNG

    def said(self) -> str:
        """Its output."""
        return self.log.read_text(errors="replace")


@dataclass(frozen=True)
class Manner:
    """Differences of a child from a plain one."""

    unprivileged: bool = False
    """Give up root first: permissions mean nothing to it."""
    file_limit: tuple[int, int] | None = None
    """(n, bytes): from the n-th save on, no file may grow larger, as with a quota."""
    lock_wait_s: float | None = None
    """Seconds to wait for another run in the same folder."""


PLAIN = Manner()


def start(work: Callable[[int], int], log: Path, *, ranks: int = 1, manner: Manner = PLAIN) -> Job:
    """Fork children that each do `work(pipe)`, which returns an exit code, with their output in `log`."""
    reading, writing = os.pipe()
    parent, port = os.getpid(), free_port() if ranks > 1 else 0
    sys.stdout.flush()
    sys.stderr.flush()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reading)
                die_with_parent(parent)
                become_rank(rank, ranks, port)
                prepare(log, writing if rank == 0 else None, manner)
                code = work(writing)
            except BaseException:
                traceback.print_exc()
            finally:
                with suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    os.close(writing)
    return Job(pids, reading, log)


def become_rank(rank: int, ranks: int, port: int) -> None:
    """The variables of a rank that torchrun started; none for a job of one."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if ranks > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")


def prepare(log: Path, pipe: int | None, manner: Manner) -> None:
    """Make this child what the job wants."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if pipe is not None:
        saver.save_checkpoint = announced(saver.save_checkpoint, SAVE, pipe, limit_files(manner))
        pretrain.resume = announced(pretrain.resume, LOAD, pipe)
    if manner.lock_wait_s is not None:
        resume.WAIT_S = manner.lock_wait_s
        lock.single_writer.__wrapped__.__kwdefaults__["wait_s"] = manner.lock_wait_s
    if manner.unprivileged and os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        die_with_parent(os.getppid())  # the kernel forgets it with the user


def announced(
    function: Callable[..., Any], letter: str, pipe: int, before: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    """`function`, telling when it begins and ends."""

    def wrapper(*args: Any, **settings: Any) -> Any:
        before()
        os.write(pipe, letter.encode())
        try:
            return function(*args, **settings)
        finally:
            os.write(pipe, letter.lower().encode())

    return wrapper


def limit_files(manner: Manner) -> Callable[[], None]:
    """Called before each save."""
    count = 0

    def before() -> None:
        nonlocal count
        count += 1
        if manner.file_limit and count >= manner.file_limit[0]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (manner.file_limit[1], resource.RLIM_INFINITY))

    return before
