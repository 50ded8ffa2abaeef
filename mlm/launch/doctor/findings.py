"""Findings of ranks, and one row of a table for all of them."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

import mlm
from mlm.parallel.watch import name_ranks

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
