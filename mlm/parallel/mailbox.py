"""Messages between the two ranks of an axis on one host, through memory that both map.

gloo sends them through sockets: 1.5 MiB take it 1.9 ms, with four changes of thread, and 0.5 ms here.

The memory is an anonymous file: it has no name to collide or to be left behind, and is gone with the last of
the two processes, however they end. A rank writes a message into one of its two slots and then, into a word
of its own, the number of it; the other reads the word, the message, and notes that it has. These orders are
kept by x86 processors alone, so that others use gloo.
"""

import mmap
import os
import platform
import secrets
import select
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

SLOT_BYTES = 16 << 20
"""Largest message. Pages that no message reaches take no memory."""
HEADER_BYTES = 4096
NAME = "mlm-mailbox"
WORDS_OF_LINE = 8
"""Words of 8 bytes in a cache line: each word is in a line of its own."""
IS_SUPPORTED = (
    sys.platform == "linux"
    and platform.machine() == "x86_64"
    and hasattr(os, "memfd_create")
    and hasattr(os, "pidfd_open")
)


class Mailbox:
    """This rank's side of the memory; messages are numbered from 1, by both ranks in the same order."""

    def __init__(self, fd: int, rank: int, peer: int, timeout_s: float) -> None:
        self.rank, self.peer, self.timeout_s = rank, peer, timeout_s
        memory = mmap.mmap(fd, HEADER_BYTES + 4 * SLOT_BYTES)
        self.words = memoryview(memory)[:HEADER_BYTES].cast("q")
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES).view(2, 2, SLOT_BYTES)
        self.own_slots, self.peer_slots = slots[rank], slots[1 - rank]
        self.count = self.pending = 0
        self.peer_exit = os.pidfd_open(peer)  # readable once that process has ended
        weakref.finalize(self, os.close, self.peer_exit)

    def send(self, x: Tensor) -> int | None:
        """Send a tensor; return the number of its message and the peer's.

        None sends nothing: it is too large, or two are under way. Both ranks decide alike.
        """
        if self.pending == 2 or not 0 < x.nbytes <= SLOT_BYTES:
            return None
        number = self.count + 1
        self._wait_for(self._word(1 - self.rank, "read", number), number - 2)
        self.own_slots[number % 2][: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        self.words[self._word(self.rank, "sent", number)] = number
        self.count, self.pending = number, self.pending + 1
        return number

    def receive(self, number: int, target: Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Let `take(target, x)` read the peer's message x, of the dtype and shape of `target`."""
        self._wait_for(self._word(1 - self.rank, "sent", number), number)
        x = self.peer_slots[number % 2][: target.nbytes].view(target.dtype).view(target.shape)
        take(target, x)
        self.words[self._word(self.rank, "read", number)] = number
        self.pending -= 1

    @staticmethod
    def _word(rank: int, kind: str, number: int) -> int:
        return WORDS_OF_LINE * (4 * rank + 2 * (kind == "read") + number % 2)

    def _wait_for(self, word: int, number: int) -> None:
        """Wait until the peer's word is `number`. Raises RuntimeError if it has ended, or at the timeout."""
        words, turns, deadline = self.words, 0, time.monotonic() + self.timeout_s
        while words[word] < number:
            turns += 1
            if turns < 1000:
                os.sched_yield()
                continue
            # another rank that computes for long should have this processor
            time.sleep(50e-6 if turns < 3000 else 1e-3)
            if turns % 64:
                continue
            if time.monotonic() > deadline:
                raise RuntimeError(f"shared memory: timed out after {self.timeout_s:g} s")
            if select.select([self.peer_exit], [], [], 0)[0] and words[word] < number:
                raise RuntimeError(f"shared memory: connection closed by peer, process {self.peer} ended")


@dataclass(slots=True)
class Message:
    """A message under way in both directions."""

    mailbox: Mailbox
    number: int
    target: Tensor
    take: Callable[[Tensor, Tensor], Tensor]
    """Tensor.add_ or Tensor.copy_: joins the peer's tensor to `target`."""

    def wait(self) -> None:
        self.mailbox.receive(self.number, self.target, self.take)


def open_mailbox(group: ProcessGroup, rank: int, timeout_s: float) -> Mailbox | None:
    """A mailbox for the two ranks of a gloo group, of which this is `rank`; None where there can be none.

    Both call it, and get one or none alike: on other systems and on two hosts there is none.
    """
    fd, token = -1, secrets.randbits(62)
    if IS_SUPPORTED and rank == 0:
        fd = os.memfd_create(NAME)
        os.ftruncate(fd, HEADER_BYTES + 4 * SLOT_BYTES)
        os.pwrite(fd, token.to_bytes(8, "little"), HEADER_BYTES - 8)
    facts = torch.zeros(2, 3, dtype=torch.int64)
    facts[rank] = torch.tensor([os.getpid(), fd, token])
    dist.all_reduce(facts, group=group)
    (first, first_fd, token), (second, _, _) = facts.tolist()
    if IS_SUPPORTED and rank == 1:
        fd = _open_memory(f"/proc/{first}/fd/{first_fd}", token)
    mailbox = None
    if fd >= 0:
        try:
            mailbox = Mailbox(fd, rank, second if rank == 0 else first, timeout_s)
        except OSError:  # a process of another namespace, a kernel without pidfd_open, no memory to map
            mailbox = None
    has_both = torch.tensor([mailbox is not None], dtype=torch.int64)
    dist.all_reduce(has_both, op=dist.ReduceOp.MIN, group=group)
    if fd >= 0:
        os.close(fd)  # mapped by both
    return mailbox if has_both.item() else None


def _open_memory(path: str, token: int) -> int:
    """Open the other rank's memory; -1 if what is there is something else, as on another host."""
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            return -1
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return -1
    if os.pread(fd, 8, HEADER_BYTES - 8) == token.to_bytes(8, "little"):
        return fd
    os.close(fd)
    return -1
