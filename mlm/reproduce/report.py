"""The report of an experiment: a page, Markdown, pictures, and all numbers as JSON, in its folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlm.launch.doctor.findings import versions
from mlm.reproduce.conclusion import Conclusion, Table
from mlm.reproduce.corpus import DOCUMENTS, TEXT
from mlm.reproduce.experiment import Experiment
from mlm.reproduce.host import hardware_here, versions_here
from mlm.reproduce.page import page_of, shown
from mlm.reproduce.pictures import draw
from mlm.reproduce.results import Results
from mlm.reproduce.text import LICENCES, packages
from mlm.tracking.history import finite
from mlm.util.atomic import as_json, write_atomic
from mlm.util.errors import UserError

PAGE = "report.html"
MADE = "<!-- Written by mlm reproduce, which replaces this file. -->"


def write_report(experiment: Experiment, conclusion: Conclusion, results: Results) -> Path:
    """Write report.html, report.md, result.json and the pictures; return the page. Raises UserError."""
    folder = results.folder / experiment.name
    facts = machine(results)
    pictures = {chart.name: draw(chart, "svg") for chart in conclusion.charts}
    pictures |= {drawing.name: drawing.svg.encode() for drawing in conclusion.drawings}
    files: dict[str, bytes] = {f"{name}.svg": svg for name, svg in pictures.items()}
    files |= {f"{chart.name}.png": draw(chart, "png") for chart in conclusion.charts}
    files["report.md"] = markdown(experiment, conclusion, results, facts).encode()
    files["result.json"] = as_json(document(experiment, conclusion, results, facts))
    files[PAGE] = page_of(experiment, conclusion, results, facts, pictures)
    try:
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            write_atomic(folder / name, content)
    except OSError as error:
        raise UserError(
            f"out={results.folder}: {error.filename}: {error.strerror}; free or permit it"
        ) from error
    return folder / PAGE


def machine(results: Results) -> dict[str, str]:
    """Return what the numbers were measured with, in words; of an experiment without steps, this machine."""
    records = results.records.values()
    text = results.folder / DOCUMENTS / LICENCES
    return {
        "scale": results.config.scale,
        "hardware": "; ".join(dict.fromkeys(each.hardware for each in records)) or hardware_here(),
        "versions": "; ".join(dict.fromkeys(each.versions for each in records)) or versions_here(),
        "seeds": ", ".join(map(str, results.seeds)),
        **({"text": ", ".join(packages(text))} if TEXT in results.steps and text.is_file() else {}),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def document(
    experiment: Experiment, conclusion: Conclusion, results: Results, facts: Mapping[str, str]
) -> dict[str, Any]:
    """Return all that a report says, for machines; numbers that are not finite are null."""
    found = {
        "task": "reproduce",
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "claim": experiment.claim,
        "verdict": conclusion.verdict.name.lower(),
        "seen": conclusion.seen,
        "limits": list(conclusion.limits),
        "machine": dict(facts),
        "tables": [asdict(table) for table in conclusion.tables],
        "charts": [asdict(chart) for chart in conclusion.charts],
        "commands": [list(pair) for pair in conclusion.commands],
        "steps": {name: asdict(results.records[name]) for name in results.steps},
        "versions": versions(),
    }
    return {key: finite(value) for key, value in found.items()}


def markdown(
    experiment: Experiment, conclusion: Conclusion, results: Results, facts: Mapping[str, str]
) -> str:
    """Return the report as Markdown."""
    parts = [
        MADE,
        f"# {experiment.name}: {experiment.title}",
        f"**{experiment.source}.** {experiment.claim}",
        f"**Seen here:** {conclusion.seen}",
        f"**Verdict:** {conclusion.verdict.value}.",
        *(markdown_table(table) for table in conclusion.tables),
        *(f"![{chart.title}]({chart.name}.png)" for chart in conclusion.charts),
        *(f"![{drawing.title}]({drawing.name}.svg)" for drawing in conclusion.drawings),
    ]
    if conclusion.limits:
        parts += ["## What this cannot show", "\n".join(f"- {line}" for line in conclusion.limits)]
    if conclusion.commands:
        lines = [f"# {what}\n{line}" for what, line in conclusion.commands]
        parts += ["## Commands", "```sh\n" + "\n".join(lines) + "\n```"]
    parts += ["## Measured with", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """Return a table as Markdown."""
    lines = [
        f"**{table.title}**",
        "",
        row(table.headings),
        row(["---", *["---:"] * (len(table.headings) - 1)]),
        *(row([shown(cell) for cell in cells]) for cells in table.rows),
    ]
    return "\n".join(lines) + (f"\n\n{table.note}" if table.note else "")


def row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
