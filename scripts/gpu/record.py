"""Results of the check: one JSON file for machines, one Markdown file for people, written after every step.

Standard library only: the first process must work where every other package is missing.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu.catalogue import Step

RESULT, TABLES = "gpu_check.json", "gpu_check.md"
KEPT = ("ok", "failed", "timed out")
"""States of a step that is not run again. `cut short` (the time of the whole check ran out) and `not reached`
are."""
BAD = ("failed", "timed out")


class Record:
    """State of each step, from this call and earlier ones. Raises ValueError for a foreign file."""

    def __init__(self, folder: Path, steps: Iterable[Step], identity: Mapping[str, Any]) -> None:
        self.folder, self.titles = folder, {step.name: step.title for step in steps}
        self.identity = dict(identity)
        """Facts that results depend on: they count for the same code, torch, device and sizes only."""
        self.steps: dict[str, dict[str, Any]] = {}
        path = folder / RESULT
        if path.exists():
            try:
                self.steps = dict(json.loads(path.read_text())["steps"])
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path}: is no result of this check; name another folder") from None

    def is_done(self, name: str) -> bool:
        """True if the step need not run: it ran with the same code and torch."""
        entry = self.steps.get(name)
        return entry is not None and entry["identity"] == self.identity and entry["state"] in KEPT

    def rows(self, name: str, table: str) -> list[dict[str, Any]]:
        entries = self.steps.get(name, {}).get("entries", [])
        return [entry["row"] for entry in entries if entry.get("table") == table]

    def put(self, name: str, **entry: Any) -> None:
        self.steps[name] = {**entry, "identity": self.identity}
        self.write()

    def write(self) -> None:
        """Write both files, each whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {"identity": self.identity, "steps": self.steps}
        _replace(self.folder / RESULT, json.dumps(finite(document), indent=1, allow_nan=False) + "\n")
        _replace(self.folder / TABLES, self.markdown())

    def markdown(self) -> str:
        lines = ["# One GPU, checked", "", _words(self.identity), ""]
        order = [name for name in self.titles if name in self.steps]
        lines += ["| step | result | seconds |", "| --- | --- | --- |"]
        for name in order:
            entry = self.steps[name]
            lines.append(f"| {name} | {self.state(name)} | {entry.get('seconds') or 0:.0f} |")
        for name in order:
            entry, tables = self.steps[name], dict[str, list[dict[str, Any]]]()
            lines += ["", f"## {name}: {self.titles[name]}", ""]
            for item in entry.get("entries", []):
                if "row" in item:
                    tables.setdefault(item["table"], []).append(item["row"])
                elif "note" in item:
                    lines.append(f"- {item['note']}")
                else:
                    lines.append(f"- **problem**: {item['problem']}")
            for table, rows in tables.items():
                columns = list(dict.fromkeys(key for row in rows for key in row))
                lines += ["", f"{table}:", "", _line(columns), _line("---" for _ in columns)]
                lines += [_line(_cell(row.get(column, "")) for column in columns) for row in rows]
            if entry.get("tail"):
                lines += ["", "```", *entry["tail"], "```"]
        return "\n".join(lines) + "\n"

    def state(self, name: str) -> str:
        """The end of a step, and that it was with other code if it was."""
        entry = self.steps[name]
        other = "" if entry["identity"] == self.identity else f" ({_words(entry['identity'])})"
        return f"{entry['state']}{other}"


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all. mlm.util.files does more, but packages it needs may be missing."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def finite(value: Any) -> Any:
    """The value with null for every number that is not finite."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    """A number with four digits that count, or text that breaks no table."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _words(identity: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in identity.items())
