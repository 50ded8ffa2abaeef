"""The record of a rehearsal: what was planted, found and lost, as JSON and as a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "rehearsal"
HEAD = ("case", "planted", "found within", "said", "lost", "took", "result")


@dataclass(frozen=True)
class Finding:
    """Result of a case."""

    planted: str
    found_s: float | None
    """Seconds from the planted fault to the first line that names it, or to what shows that it is known."""
    said: str
    lost: str


@dataclass(frozen=True)
class Row(Finding):
    """A case that was run."""

    case: str
    took_s: float
    passed: bool


def write(folder: Path, facts: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write both files; rows of cases that were not run again stay."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.json"
    before = json.loads(path.read_text())["cases"] if path.exists() else []
    kept = {row["case"]: row for row in before} | {row.case: asdict(row) for row in rows}
    path.write_text(json.dumps({"facts": dict(facts), "cases": list(kept.values())}, indent=1) + "\n")
    (folder / f"{NAME}.md").write_text(table(facts, [Row(**row) for row in kept.values()]))


def table(facts: Mapping[str, str], rows: Sequence[Row]) -> str:
    lines = ["# The rehearsal on a SLURM cluster of two nodes", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    for row in rows:
        found = "" if row.found_s is None else f"{row.found_s:.1f} s"
        cells = (row.case, row.planted, found, row.said, row.lost, f"{row.took_s:.0f} s")
        result = "pass" if row.passed else "FAIL"
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, result)) + " |")
    return "\n".join(lines) + "\n"
