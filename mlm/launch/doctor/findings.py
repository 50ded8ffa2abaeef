"""Findings of ranks, one row of a table for all of them, and the exchange that names silent ranks."""

import json
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed import Store, TCPStore

import mlm
from mlm.checkpoint.native.exchange import Ranks
from mlm.launch.network import LOOPBACK, no_connection
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.watch import Watch, name_ranks
from mlm.util.errors import CheckFailedError

GRACE_S = 5.0
"""Seconds that the others get to read the last values, and rank 0 to answer after its own wait."""
SAME_VERSIONS = "install the same version on every host"
Status = Literal["ok", "warn", "fail"]
SEVERITY: tuple[Status, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    status: Status
    result: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    """Ranks with this status, in a row over all ranks; empty if all of them are ok."""


def finding(check: str, result: str, remedy: str, *, fails: bool = False, warns: bool = False) -> Finding:
    """Return a finding whose status is the worst that holds."""
    return Finding(check, "fail" if fails else "warn" if warns else "ok", result, remedy)


def rows_of(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Return one finding for each check: the worst of its results, with the ranks that have it.

    `by_rank` and `hosts` are in rank order.
    """
    rows = []
    for check in dict.fromkeys(found.check for findings in by_rank for found in findings):
        worst_of_rank = {
            rank: max(results, key=lambda found: SEVERITY.index(found.status))
            for rank, findings in enumerate(by_rank)
            if (results := [found for found in findings if found.check == check])
        }
        status = max((found.status for found in worst_of_rank.values()), key=SEVERITY.index)
        ranks = tuple(rank for rank, found in worst_of_rank.items() if found.status == status)
        first = worst_of_rank[ranks[0]]
        if status == "ok":
            texts = list(dict.fromkeys(found.result for found in worst_of_rank.values()))
            rows.append(Finding(check, status, "; ".join(texts[:3]) + ("; …" if texts[3:] else "")))
        elif list(worst_of_rank) == [0]:  # the only rank, or rank 0 has compared all
            ranks = (0,) if len(hosts) == 1 else ()
            rows.append(Finding(check, status, first.result, first.remedy, ranks))
        else:
            result = f"{ranks_with_hosts(ranks, hosts)}: {first.result}"
            rows.append(Finding(check, status, result, first.remedy, ranks))
    return rows


def versions() -> dict[str, str]:
    """Return the versions that numbers depend on."""
    return {"mlm": mlm.__version__, "torch": torch.__version__, "python": platform.python_version()}


def different_versions(hosts: Sequence[str], by_rank: Sequence[Mapping[str, str]]) -> str:
    """Return what differs from rank 0: `torch 2.12 on rank 3 (host b), 2.11 on rank 0 (host a)`.

    Empty if nothing does. Both arguments are in rank order.
    """
    for name, first in by_rank[0].items():
        others = [rank for rank, known in enumerate(by_rank) if known.get(name) != first]
        if others:
            other = by_rank[others[0]].get(name)
            same = [rank for rank in others if by_rank[rank].get(name) == other]
            there, here = ranks_with_hosts(same, hosts), ranks_with_hosts([0], hosts)
            return f"{name} {other} on {there}, {first} on {here}"
    return ""


def ranks_with_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return ranks with their hosts: `ranks 2, 3 (host b)`."""
    where = list(dict.fromkeys(hosts[rank] for rank in ranks))
    shown = ", ".join(where[:3]) + (", …" if len(where) > 3 else "")
    return f"{name_ranks(ranks)} (host{'s' * (len(where) > 1)} {shown})"


class Control:
    """The ranks of one examination, over a key-value store that rank 0 serves on a free port.

    Args:
        store: reached by all ranks; None for one rank.
        timeout_s: seconds that all ranks get to come to an exchange.
    """

    def __init__(self, store: Store | None, rank: int, world_size: int, timeout_s: float) -> None:
        self.store, self.rank, self.world_size, self.timeout_s = store, rank, world_size, timeout_s
        self.hosts = [socket.gethostname()] * world_size
        self.watch = Watch(rank)
        self._count = 0

    @classmethod
    def of(cls, ctx: ParallelContext, address: str, timeout_s: float) -> "Control":
        """Open the store. Collective. Raises CheckFailedError if a rank cannot reach it."""
        if ctx.world_size == 1:
            return cls(None, 0, 1, timeout_s)
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False) if ctx.is_main else None
        port = int(Ranks.of(ctx).broadcast(store.port if store is not None else 0))
        if store is None:
            wait_s = min(timeout_s, 10.0)
            if reason := no_connection(address, port, wait_s):
                raise CheckFailedError(
                    f"rank {ctx.rank} (host {socket.gethostname()}) cannot connect to rank 0 at {address} "
                    f"port {port} within {wait_s:g} s ({reason}): open all ports between the hosts"
                )
            store = TCPStore(address, port, is_master=False, wait_for_workers=False)
        control = cls(store, ctx.rank, ctx.world_size, timeout_s)
        control.watch = ctx.watch
        control.hosts = control.all_gather("the first exchange", socket.gethostname())
        return control

    def all_gather(self, check: str, value: Any) -> list[Any]:
        """Return every rank's JSON value, on every rank. Collective.

        Raises, on all ranks that answer, CheckFailedError naming the ranks that do not within `timeout_s`;
        LostPeer where rank 0 has ended. If rank 0 hangs, the watchdog ends this rank.
        """
        if self.store is None:
            return [value]
        self._count += 1
        keys = [f"{self._count}/{rank}" for rank in range(self.world_size)]
        with self.watch.waiting(check, "world", tuple(range(self.world_size)), self.timeout_s + GRACE_S):
            self.store.set(keys[self.rank], json.dumps(value))
            silent = self._wait_for(keys, self.timeout_s)
            if not silent:
                return [json.loads(answer) for answer in self.store.multi_get(keys)]
        raise CheckFailedError(
            f"{ranks_with_hosts(silent, self.hosts)}: no answer for {self.timeout_s:g} s (timeout_s) at "
            f"{check}: hung or dead; look there (dmesg, nvidia-smi, the disk of out), or start without "
            "that host"
        )

    def _wait_for(self, keys: Sequence[str], timeout_s: float) -> list[int]:
        """Return the ranks whose key is not written after `timeout_s`. Store.wait prints C++ stacks."""
        assert self.store is not None
        end = time.monotonic() + timeout_s
        while not self.store.check(list(keys)):
            if time.monotonic() > end:
                return [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            time.sleep(0.005)
        return []

    def close(self) -> None:
        """Let rank 0, with which the store ends, wait until all have read from it. Collective."""
        if self.store is None:
            return
        keys = [f"closed/{rank}" for rank in range(self.world_size)]
        with suppress(RuntimeError):
            self.store.set(keys[self.rank], "")
            if self.rank == 0:
                self._wait_for(keys, GRACE_S)
