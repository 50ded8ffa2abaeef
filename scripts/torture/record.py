"""Findings of a torture session: counts for people and a record for machines."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.harness import table_of
from rich.console import RenderableType
from rich.text import Text

from torture.inspection import Findings

FINDINGS = {"checkpoints_lost": "lost", "silent_corruptions": "silent", "other_findings": "other"}
"""Name in the record -> field of Findings."""


@dataclass
class Round:
    """One kill or one fault."""

    kind: str
    """kill, or fault."""
    aim: str
    """The target: saving, …; or the injected error."""
    met: str
    """The operation that a kill hit; empty for an injected error."""
    note: str
    seconds: float
    found: Findings


@dataclass
class Record:
    """All rounds of a session."""

    seed: int
    layouts: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    def count(self, name: str) -> int:
        """Findings of a sort: lost, silent, other."""
        return sum(len(getattr(r.found, name)) for r in self.rounds)

    @property
    def clean(self) -> bool:
        return not any(self.count(kind) for kind in FINDINGS.values())

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        kills = [r for r in self.rounds if r.kind == "kill"]
        return {
            "seed": self.seed,
            "rounds": len(self.rounds),
            "kills": len(kills),
            "kills_by_aim": dict(Counter(r.aim for r in kills)),
            "kills_by_what_they_met": dict(Counter(r.met for r in kills)),
            "faults": len(self.rounds) - len(kills),
            "faults_by_kind": dict(Counter(r.aim for r in self.rounds if r.kind == "fault")),
            **{name: self.count(kind) for name, kind in FINDINGS.items()},
            "seconds": round(time.perf_counter() - self.begun, 1),
            "layouts": self.layouts,
            "log": [asdict(r) for r in self.rounds],
        }


def tables(result: dict[str, Any]) -> Iterator[RenderableType]:
    """Counts of each kill and fault, and every finding."""
    log, rows = result["log"], []
    for kind, aim in dict.fromkeys((r["kind"], r["aim"]) for r in log):
        mine = [r for r in log if (r["kind"], r["aim"]) == (kind, aim)]
        sums = (str(sum(len(r["found"][name]) for r in mine)) for name in FINDINGS.values())
        rows.append((f"kill -9: {aim}" if kind == "kill" else aim, str(len(mine)), *sums))
    rows.append(("all", str(len(log)), *(str(result[name]) for name in FINDINGS)))
    yield table_of(("what was done", "times", *(name.replace("_", " ") for name in FINDINGS)), rows)
    met = result["kills_by_what_they_met"]
    yield "kills met: " + ", ".join(f"{what} {times}" for what, times in met.items())
    for number, r in enumerate(log, 1):
        for line in (line for lines in r["found"].values() for line in lines):
            yield Text(f"round {number}, {r['aim']} ({r['note']}): {line}")
