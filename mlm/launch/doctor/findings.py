"""Findings of ranks, one row of a table for all of them, and the exchange that names silent ranks."""

import json
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import Store, TCPStore

import mlm
from mlm.checkpoint.native.exchange import Ranks
from mlm.launch.rendezvous import LOOPBACK, no_connection
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.watch import name_ranks
from mlm.util.errors import CheckFailedError

POLL_S = 0.005
GRACE_S = 5.0
"""Seconds that other ranks wait longer than rank 0, which names those that do not answer."""
CONNECT_S = 10.0
SAME_VERSIONS = "install the same version on every host"
Status = Literal["ok", "warn", "fail"]
SEVERITY: tuple[Status, ...] = ("ok", "warn", "fail")
SHOWN = 3
"""Different results of ranks that are fine which a row lists."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    """Its name."""
    status: Status
    result: str
    """The result, in words."""
    remedy: str = ""
    """The remedy; empty if it is ok."""


@dataclass(frozen=True)
class Row:
    """Result of one check over all ranks."""

    check: str
    status: Status
    result: str
    remedy: str
    ranks: tuple[int, ...]
    """Ranks with this status; empty if all of them are ok."""


def rows_of(each: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Row]:
    """Return a row for each check: the worst of its results, with the ranks that it is of.

    `each` and `hosts` are in rank order.
    """
    names = list(dict.fromkeys(finding.check for findings in each for finding in findings))
    return [_row(name, each, hosts) for name in names]


def _row(name: str, each: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> Row:
    mine = {
        rank: finding
        for rank, findings in enumerate(each)
        for finding in sorted(findings, key=lambda one: SEVERITY.index(one.status))  # the worst stays
        if finding.check == name
    }
    worst = max((finding.status for finding in mine.values()), key=SEVERITY.index)
    ranks = tuple(rank for rank, finding in mine.items() if finding.status == worst)
    if worst == "ok":
        texts = list(dict.fromkeys(finding.result for finding in mine.values()))
        return Row(name, worst, "; ".join(texts[:SHOWN]) + ("; …" if texts[SHOWN:] else ""), "", ())
    first = mine[ranks[0]]
    if list(mine) == [0] and len(hosts) > 1:  # rank 0 has compared all
        return Row(name, worst, first.result, first.remedy, ())
    where = f"{named_ranks(ranks, hosts)}: " if len(hosts) > 1 else ""
    return Row(name, worst, f"{where}{first.result}", first.remedy, ranks)


def versions() -> dict[str, str]:
    """Return the versions that numbers depend on."""
    return {"mlm": mlm.__version__, "torch": torch.__version__, "python": platform.python_version()}


def different_versions(hosts: Sequence[str], each: Sequence[Mapping[str, str]]) -> str:
    """Return what differs from rank 0: `torch 2.12 on rank 3 (host b), 2.11 on rank 0 (host a)`.

    Empty if nothing does. Both arguments are in rank order.
    """
    for name, ours in each[0].items():
        others = [rank for rank, theirs in enumerate(each) if theirs.get(name) != ours]
        if others:
            theirs = each[others[0]].get(name)
            same = [rank for rank in others if each[rank].get(name) == theirs]
            return f"{name} {theirs} on {named_ranks(same, hosts)}, {ours} on {named_ranks([0], hosts)}"
    return ""


def named_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
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
        self.clock = time.time
        self.published = (0.0, 0.0, 0.0)
        """Clock of this rank before the last exchange, of rank 0 at it, and of this rank after it."""
        self._count = 0

    @classmethod
    def of(cls, ctx: ParallelContext, address: str, timeout_s: float) -> "Control":
        """Open the store. Collective. Raises CheckFailedError if a rank cannot reach it."""
        if ctx.world_size == 1:
            return cls(None, 0, 1, timeout_s)
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False) if ctx.is_main else None
        port = int(Ranks.of(ctx).broadcast(store.port if store is not None else 0))
        if store is None:
            wait_s = min(timeout_s, CONNECT_S)
            if reason := no_connection(address, port, wait_s):
                raise CheckFailedError(
                    f"rank {ctx.rank} (host {socket.gethostname()}) cannot connect to rank 0 at {address} "
                    f"port {port} within {wait_s:g} s ({reason}): open all ports between the hosts"
                )
            store = TCPStore(address, port, is_master=False, wait_for_workers=False)
        control = cls(store, ctx.rank, ctx.world_size, timeout_s)
        control.hosts = control.all_gather("the first exchange", socket.gethostname())
        return control

    def all_gather(self, check: str, value: Any) -> list[Any]:
        """Return every rank's JSON value, on every rank. Collective.

        Raises CheckFailedError, on all ranks that answer, with those that do not within `timeout_s`.
        """
        if self.store is None:
            return [value]
        self._count += 1
        before, key = self.clock(), str(self._count)
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            answer = self._collect(key)
            self.store.set(f"{key}/all", json.dumps(answer))
            # the store ends with this process, which may be done
            self._wait_for(f"{key}/read", set(range(1, self.world_size)) - set(answer["lost"]), GRACE_S)
        try:
            self.store.wait([f"{key}/all"], timedelta(seconds=self.timeout_s + GRACE_S))
            answer = json.loads(self.store.get(f"{key}/all"))
        except RuntimeError:  # the store went down with its process, or the process hangs
            raise self._lost([0], check) from None
        with suppress(RuntimeError):  # rank 0 waited for this long enough, and ended
            self.store.set(f"{key}/read/{self.rank}", "")
        self.published = (before, answer["at"], self.clock())
        if answer["lost"]:
            raise self._lost(answer["lost"], check)
        values: list[Any] = answer["values"]
        return values

    def _collect(self, key: str) -> dict[str, Any]:
        assert self.store is not None
        absent = self._wait_for(key, set(range(self.world_size)), self.timeout_s)
        values = [] if absent else [json.loads(self.store.get(f"{key}/{r}")) for r in range(self.world_size)]
        return {"values": values, "lost": absent, "at": self.clock()}

    def _wait_for(self, key: str, ranks: set[int], timeout_s: float) -> list[int]:
        """Wait until these ranks have written under a key; return those that have not after `timeout_s`."""
        assert self.store is not None
        end, absent = time.monotonic() + timeout_s, sorted(ranks)
        while absent and time.monotonic() < end:
            time.sleep(POLL_S)
            absent = [rank for rank in absent if not self.store.check([f"{key}/{rank}"])]
        return absent

    def _lost(self, ranks: list[int], check: str) -> CheckFailedError:
        return CheckFailedError(
            f"{named_ranks(ranks, self.hosts)}: no answer for {self.timeout_s:g} s (timeout_s) at {check}: "
            "hung or dead; look there (dmesg, nvidia-smi, the disk of out), or start without that host"
        )

    def skew(self) -> float:
        """Seconds that the clock of this rank is certainly off rank 0's: ahead is positive.

        Rank 0 published the last exchange after this rank came to it and before this rank read it.
        """
        before, at, after = self.published
        return max(0.0, before - at) - max(0.0, at - after)
