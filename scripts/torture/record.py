"""Findings of a torture session: counts for people and a record for machines."""

import platform
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import mlm
from torture.inspection import Findings


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
        return not any(self.count(name) for name in ("lost", "silent", "other"))

    def as_json(self, command: str) -> dict[str, Any]:
        """For machines."""
        kills = [r for r in self.rounds if r.kind == "kill"]
        return {
            "script": "torture_checkpoint",
            "command": command,
            "seed": self.seed,
            "rounds": len(self.rounds),
            "kills": len(kills),
            "kills_by_aim": dict(Counter(r.aim for r in kills)),
            "kills_by_what_they_met": dict(Counter(r.met for r in kills)),
            "faults": len(self.rounds) - len(kills),
            "faults_by_kind": dict(Counter(r.aim for r in self.rounds if r.kind == "fault")),
            "checkpoints_lost": self.count("lost"),
            "silent_corruptions": self.count("silent"),
            "other_findings": self.count("other"),
            "seconds": round(time.perf_counter() - self.begun, 1),
            "layouts": self.layouts,
            "versions": {
                "mlm": mlm.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "log": [asdict(r) for r in self.rounds],
        }

    def show(self, console: Console) -> None:
        """For people."""
        table = Table(box=SIMPLE_HEAD, title="checkpoints under torture", title_justify="left")
        table.add_column("what was done")
        for name in ("times", "checkpoints lost", "silent corruptions", "other findings"):
            table.add_column(name, justify="right")
        for kind, aim in dict.fromkeys((r.kind, r.aim) for r in self.rounds):
            mine = [r for r in self.rounds if (r.kind, r.aim) == (kind, aim)]
            sums = [sum(len(getattr(r.found, name)) for r in mine) for name in ("lost", "silent", "other")]
            label = f"kill -9: {aim}" if kind == "kill" else aim
            table.add_row(label, str(len(mine)), *map(str, sums))
        table.add_section()
        totals = [str(self.count(name)) for name in ("lost", "silent", "other")]
        table.add_row("all", str(len(self.rounds)), *totals)
        console.print(table)
        met = Counter(r.met for r in self.rounds if r.kind == "kill")
        console.print("kills met: " + ", ".join(f"{what} {times}" for what, times in met.most_common()))
        for number, r in enumerate(self.rounds, 1):
            for line in r.found.all():
                console.print(f"round {number}, {r.aim} ({r.note}): {line}", style="bold red", markup=False)
