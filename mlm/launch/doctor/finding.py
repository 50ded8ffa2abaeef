"""Results of checks: one of each rank, and one row of a table for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlm.launch.versions import named

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
    found: str
    """The result, in words."""
    remedy: str = ""
    """The remedy; empty if it is ok."""


@dataclass(frozen=True)
class Row:
    """Result of one check over all ranks."""

    check: str
    status: Status
    found: str
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
        texts = list(dict.fromkeys(finding.found for finding in mine.values()))
        return Row(name, worst, "; ".join(texts[:SHOWN]) + ("; …" if texts[SHOWN:] else ""), "", ())
    first = mine[ranks[0]]
    if list(mine) == [0] and len(hosts) > 1:  # rank 0 has compared all
        return Row(name, worst, first.found, first.remedy, ())
    where = f"{named(ranks, hosts)}: " if len(hosts) > 1 else ""
    return Row(name, worst, f"{where}{first.found}", first.remedy, ranks)
