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
class CheckResult:
    """Result of one check."""

    check: str
    status: Status
    result: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    """Ranks with this status, in a row over all ranks; empty if all are ok."""


def check_result(
    check: str, result: str, remedy: str, *, fails: bool = False, warns: bool = False
) -> CheckResult:
    """Return a result with the worst status that holds."""
    return CheckResult(check, "fail" if fails else "warn" if warns else "ok", result, remedy)


def rows_of(by_rank: Sequence[Sequence[CheckResult]], hosts: Sequence[str]) -> list[CheckResult]:
    """Return one row per check: its worst result, with the ranks that have it.

    `by_rank` and `hosts` are in rank order.
    """
    rows = []
    for check in dict.fromkeys(result.check for results in by_rank for result in results):
        worst_of_rank = {
            rank: max(of_check, key=lambda result: SEVERITY.index(result.status))
            for rank, results in enumerate(by_rank)
            if (of_check := [result for result in results if result.check == check])
        }
        status = max((result.status for result in worst_of_rank.values()), key=SEVERITY.index)
        ranks = tuple(rank for rank, result in worst_of_rank.items() if result.status == status)
        first = worst_of_rank[ranks[0]]
        if status == "ok":
            texts = list(dict.fromkeys(result.result for result in worst_of_rank.values()))
            rows.append(CheckResult(check, status, "; ".join(texts[:3]) + ("; …" if texts[3:] else "")))
        elif list(worst_of_rank) == [0]:  # the only rank, or rank 0 has compared all
            ranks = (0,) if len(hosts) == 1 else ()
            rows.append(CheckResult(check, status, first.result, first.remedy, ranks))
        else:
            text = f"{ranks_with_hosts(ranks, hosts)}: {first.result}"
            rows.append(CheckResult(check, status, text, first.remedy, ranks))
    return rows


def versions() -> dict[str, str]:
    return {"mlm": mlm.__version__, "torch": torch.__version__, "python": platform.python_version()}


def different_versions(hosts: Sequence[str], by_rank: Sequence[Mapping[str, str]]) -> str:
    """Describe the first version that differs from rank 0: `torch 2.12 on rank 3 (host b), 2.11 on rank 0 …`.

    Empty if all are equal. Both arguments are in rank order.
    """
    for name, expected in by_rank[0].items():
        ranks = [rank for rank, facts in enumerate(by_rank) if facts.get(name) != expected]
        if ranks:
            version = by_rank[ranks[0]].get(name)
            alike = [rank for rank in ranks if by_rank[rank].get(name) == version]
            differing, main = ranks_with_hosts(alike, hosts), ranks_with_hosts([0], hosts)
            return f"{name} {version} on {differing}, {expected} on {main}"
    return ""


def ranks_with_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return ranks with their hosts: `ranks 2, 3 (host b)`."""
    unique = list(dict.fromkeys(hosts[rank] for rank in ranks))
    shown = ", ".join(unique[:3]) + (", …" if len(unique) > 3 else "")
    return f"{name_ranks(ranks)} (host{'s' * (len(unique) > 1)} {shown})"
