"""Reports: result.json, report.md and its picture, and the index of those that the repository keeps."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlm.launch.doctor.findings import versions
from mlm.util.files import write_atomic
from reproduce.corpus import packages
from reproduce.experiment import SCRIPTS, Cell, Conclusion, Curves, Experiment, Table, Verdict
from reproduce.results import Results
from reproduce.runner import hardware, program_versions

MADE = "<!-- Written by scripts/reproduce.py, which replaces this file. -->"
KEPT = SCRIPTS / "results" / "reproduce"
PLACE = re.compile(r'(?<=["=])/(?:[^/"\s]+/)+(?=[^/"\s]+")')
"""Folders before the name of a file of the user's, which say nothing to others."""
HEAD = """# The papers' experiments, as they came out

One paragraph for each report of [`scripts/reproduce.py`](../../reproduce/README.md) that is kept here: what
the paper says, what was seen, and whether that agrees. Each report names its machine and its seeds, and says
what cannot be concluded.
"""


def write_report(experiment: Experiment, conclusion: Conclusion, results: Results) -> Path:
    """Write report.md, result.json and the picture into the experiment's folder; return report.md."""
    folder = results.settings.out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    document = document_of(experiment, conclusion, results)
    if conclusion.curves is not None:
        draw(conclusion.curves, folder / f"{conclusion.curves.name}.png")
    write_atomic(folder / "result.json", (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomic(folder / "report.md", markdown(document).encode())
    return folder / "report.md"


def document_of(experiment: Experiment, conclusion: Conclusion, results: Results) -> dict[str, Any]:
    """Return all that a report says, as JSON."""
    records = list(results.records.values())
    text = packages(results.settings.out)
    machine = {
        "hardware": "; ".join(dict.fromkeys(each.hardware for each in records)) or hardware(),
        "versions": "; ".join(dict.fromkeys(each.versions for each in records)) or program_versions(),
        "seeds": ", ".join(map(str, results.seeds)),
        **({"text": ", ".join(text)} if "text" in results.steps and text else {}),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    curves = conclusion.curves
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "claim": experiment.claim,
        "verdict": conclusion.verdict.name.lower(),
        "seen": conclusion.seen,
        "limits": list(conclusion.limits),
        "machine": machine,
        "tables": [asdict(table) for table in conclusion.tables],
        "picture": None if curves is None else {"name": curves.name, "title": curves.title},
        "steps": {
            name: {"command": " ".join(record.words), "seconds": record.seconds}
            for name, record in results.records.items()
            if name in results.steps
        },
        "versions": versions(),
    }


def markdown(document: dict[str, Any]) -> str:
    """Return a result as Markdown."""
    picture = document["picture"]
    parts = [
        MADE,
        f"# {document['experiment']}: {document['title']}",
        f"**{document['source']}.** {document['claim']}",
        f"**Seen here:** {document['seen']}",
        f"**Verdict:** {Verdict[document['verdict'].upper()].value}.",
        *(markdown_table(Table(**table)) for table in document["tables"]),
        *([f"![{picture['title']}]({picture['name']}.png)"] if picture else []),
        "## What this cannot show",
        "\n".join(f"- {line}" for line in document["limits"]),
        "## Measured with",
        "\n".join(f"- {name}: {value}" for name, value in document["machine"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """Return a table as Markdown."""
    marks = ["---", *["---:"] * (len(table.headings) - 1)]
    rows = [table.headings, marks, *([text_of(cell) for cell in cells] for cells in table.rows)]
    lines = [f"**{table.title}**", "", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + (f"\n\n{table.note}" if table.note else "")


def text_of(cell: Cell) -> str:
    """Return a cell as text, floats with four significant digits."""
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1e5 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell.replace("|", "\\|")


def draw(curves: Curves, path: Path) -> None:
    """Draw medians with error bars from the least to the largest seed."""
    from matplotlib.figure import Figure  # of an extra: lists and dry runs go without
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(6.4, 4.0), dpi=100, layout="constrained")
    axes = figure.subplots()
    for (name, points), marker in zip(curves.lines.items(), "osd^vPX*" * 4, strict=False):
        x = [at for at, _ in points]
        y = [sorted(values)[len(values) // 2] for _, values in points]
        below = [middle - min(values) for middle, (_, values) in zip(y, points, strict=True)]
        above = [max(values) - middle for middle, (_, values) in zip(y, points, strict=True)]
        axes.errorbar(x, y, yerr=[below, above], label=name, marker=marker, markersize=4, capsize=2)
    axes.set(title=curves.title, xlabel=curves.x_label, ylabel=curves.y_label)
    if curves.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.grid(linewidth=0.4)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, format="png", metadata={"Software": "scripts/reproduce.py"})


def keep(folder: Path, names: Sequence[str]) -> None:
    """Copy the reports in a folder to those that the repository keeps, and write their index."""
    for name in names:
        if not (folder / name / "report.md").is_file():
            continue
        shutil.rmtree(KEPT / name, ignore_errors=True)
        shutil.copytree(folder / name, KEPT / name)
        result = KEPT / name / "result.json"
        result.write_text(PLACE.sub("", result.read_text("utf-8")), "utf-8")
    (KEPT / "README.md").write_text(index(names), "utf-8")


def index(names: Sequence[str]) -> str:
    """Return the index of all reports that are kept, in the order of the experiments."""
    parts = [HEAD]
    for name in names:
        path = KEPT / name / "result.json"
        if path.is_file():
            kept = json.loads(path.read_text("utf-8"))
            parts.append(
                f"**[{name}]({name}/report.md)**: {kept['source']}. {kept['claim']} *Seen here:* "
                f"{kept['seen'].rstrip('.')}. *Verdict:* {Verdict[kept['verdict'].upper()].value}.\n"
            )
    return "\n".join(parts)
