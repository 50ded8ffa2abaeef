"""Messages between the two ranks of an axis on one host, through shared memory.

gloo sends them through sockets: 1.5 MiB take 1.9 ms, with four thread switches, and 0.5 ms here.

The memory is an anonymous file, which has no name and is freed with the last of the two processes, however
they end. Each rank has two slots for its messages. It fills one and then writes the message's length next to
it; the peer reads both and sets the length to 0. Only x86 keeps this order of writes; other processors use
gloo.
"""

import fcntl
import mmap
import os
import platform
import secrets
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
"""Largest message. Untouched pages take no memory."""
HEADER_BYTES = 4096
"""Lengths of the messages, each in a separate cache line, then a token that identifies the file."""
NAME = "mlm-mailbox"
IS_SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


class Mailbox:
    """This rank's side of the memory. Both ranks start and wait for messages in one order."""

    def __init__(self, fd: int, rank: int, timeout_s: float) -> None:
        self.fd, self.rank, self.timeout_s = fd, rank, timeout_s
        # Held until this process ends in any way, so that the other rank notices.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        memory = mmap.mmap(fd, HEADER_BYTES + 4 * SLOT_BYTES)
        self.lengths = memoryview(memory)[:HEADER_BYTES].cast("q", (2, 2, HEADER_BYTES // 32))
        self.slots = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES).view(2, 2, SLOT_BYTES)
        self.count, self.is_pending = 0, [False, False]
        weakref.finalize(self, os.close, fd)

    @torch.no_grad()
    def start(
        self, x: Tensor, target: Tensor, take: Callable[[Tensor, Tensor], Tensor]
    ) -> "MailboxMessage | None":
        """Send x; `wait` calls `take(target, y)` with the other rank's y of target's dtype and shape.

        None if gloo must do it: x is empty or too large, or the slot's last message is still pending.
        """
        slot = self.count % 2
        if self.is_pending[slot] or not 0 < x.nbytes <= SLOT_BYTES:
            return None
        self.wait_until(self.rank, slot, is_full=False)
        self.slots[self.rank, slot, : x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        self.lengths[self.rank, slot, 0] = x.nbytes
        self.count, self.is_pending[slot] = self.count + 1, True
        return MailboxMessage(self, slot, target, take)

    def wait_until(self, rank: int, slot: int, *, is_full: bool) -> None:
        """Wait until a slot of `rank` is full or empty. Raises RuntimeError if the peer ends, or late."""
        lengths, turns, deadline = self.lengths, 0, time.monotonic() + self.timeout_s
        while (lengths[rank, slot, 0] > 0) != is_full:
            turns += 1
            if turns < 1000:
                os.sched_yield()
                continue
            # leave the processor to ranks that compute
            time.sleep(50e-6 if turns < 3000 else 1e-3)
            if turns % 64:
                continue
            if time.monotonic() > deadline:
                raise RuntimeError(f"shared memory: timed out after {self.timeout_s:g} s")
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 - self.rank)
            except OSError:
                continue
            # its lock is free, so the other process has ended, maybe after its last message
            if (lengths[rank, slot, 0] > 0) != is_full:
                raise RuntimeError("shared memory: connection closed by peer")


@dataclass(slots=True)
class MailboxMessage:
    """A pending message in both directions."""

    mailbox: Mailbox
    slot: int
    target: Tensor
    take: Callable[[Tensor, Tensor], Tensor]
    """Tensor.add_ or Tensor.copy_: joins the other rank's tensor to `target`."""

    @torch.no_grad()
    def wait(self) -> None:
        box, slot, target, peer = self.mailbox, self.slot, self.target, 1 - self.mailbox.rank
        box.wait_until(peer, slot, is_full=True)
        length = box.lengths[peer, slot, 0]
        assert length == target.nbytes, f"{length} bytes arrived for {target.nbytes} of {tuple(target.shape)}"
        self.take(target, box.slots[peer, slot, :length].view(target.dtype).view(target.shape))
        box.lengths[peer, slot, 0] = 0
        box.is_pending[slot] = False


def open_mailbox(group: ProcessGroup, rank: int, timeout_s: float) -> Mailbox | None:
    """Open a mailbox for the two ranks of a gloo group, of which this is `rank`. Both ranks call this.

    None on both ranks if they are on two hosts, on an unsupported system, in containers that do not see each
    other's processes, or without anonymous files.
    """
    fd, mailbox = -1, None
    facts = torch.tensor([os.getpid(), fd, secrets.randbits(62)])
    try:
        if IS_SUPPORTED and rank == 0:
            fd = os.memfd_create(NAME)
            os.ftruncate(fd, HEADER_BYTES + 4 * SLOT_BYTES)
            os.pwrite(fd, int(facts[2]).to_bytes(8, "little"), HEADER_BYTES - 8)
            facts[1] = fd
    except OSError:
        fd = -1
    dist.broadcast(facts, group=group, group_src=0)
    try:
        if IS_SUPPORTED and rank == 1:
            pid, pid_fd, token = facts.tolist()
            path = f"/proc/{pid}/fd/{pid_fd}"
            # on another host the path may be another file: check name and token
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):
                raise FileNotFoundError(path)
            fd = os.open(path, os.O_RDWR)
            if os.pread(fd, 8, HEADER_BYTES - 8) != token.to_bytes(8, "little"):
                raise FileNotFoundError(path)
        if fd >= 0:
            mailbox = Mailbox(fd, rank, timeout_s)
    except OSError:
        if fd >= 0:
            os.close(fd)
    has_both = torch.tensor([mailbox is not None], dtype=torch.int64)
    dist.all_reduce(has_both, op=dist.ReduceOp.MIN, group=group)
    return mailbox if has_both.item() else None
