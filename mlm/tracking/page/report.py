"""`mlm report`: write the page of runs, once or while they train."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

import mlm
from mlm.tracking.config import ReportConfig, choose_runs
from mlm.tracking.page.html import curves_of, figure, macro, page, text
from mlm.tracking.runs import MISSING, RunRecords, names_of, number, read_run
from mlm.util.errors import escape_controls, format_value
from mlm.util.results import target_name, write_result
from mlm.util.terminal import Screen, format_bytes

TEMPLATE = "sections.html"
MAX_ATTEMPTS = 6
"""Attempts listed with their commands: the first and the newest."""
MAX_DIFFERENT = 200
MAX_ROWS = 200
"""Most rows of a table of incidents, checkpoints or scores, over all runs."""
SCORES = (
    *("loss", "perplexity", "bits_per_byte", "accuracy", "adjusted_perplexity", "word_perplexity", "score"),
)
"""Keys of scores in a result without `metrics`."""


def run(
    config: ReportConfig, console: Console | None = None, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Write the page of some runs, with watch=true until all have finished.

    Raises UserError, CorruptFileError.
    """
    console = console or Screen()
    folders, skipped, _ = choose_runs(config.runs)
    for problem in skipped:
        print(f"mlm report: skipped: {escape_controls(problem)}", file=sys.stderr)
    runs = read_runs(folders)
    try:
        while config.watch and not all(run.is_finished for run in runs):
            write_page(config, runs, config.every_s)
            sleep(config.every_s)
            runs = read_runs(folders)
    finally:  # also after Ctrl-C: a page that no longer reloads
        console.print(Text(write_page(config, runs, None)), soft_wrap=True)


def read_runs(folders: Sequence[str]) -> list[RunRecords]:
    return [read_run(Path(folder), name) for folder, name in zip(folders, names_of(folders), strict=True)]


def write_page(config: ReportConfig, runs: Sequence[RunRecords], reload_s: float | None) -> str:
    content = make_page(runs, reload_s=reload_s)
    write_result(config.out, content, inputs=config.runs)
    return f"written to {target_name(config.out)} ({format_bytes(len(content))})"


def make_page(runs: Sequence[RunRecords], *, reload_s: float | None = None) -> bytes:
    """Return the page of some runs. With `reload_s` a browser reloads it after that many seconds."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    footer = f"Written {now} by mlm {mlm.__version__}."
    curves, data = curves_of(runs)
    settings = {
        key: [format_value(run.settings[key]) if key in run.settings else MISSING for run in runs]
        for key in dict.fromkeys(key for run in runs for key in run.settings)
    }
    differing = [[key, *values] for key, values in settings.items() if len(set(values)) > 1]
    equal = [[key, values[0]] for key, values in settings.items() if len(set(values)) == 1]
    hidden = max(len(differing) - MAX_DIFFERENT, 0)
    loads = [(drawing, run.name) for run in runs for record in run.loads if (drawing := draw_load(record))]
    sections = [
        ("runs", "Runs", macro(TEMPLATE, "runs", runs, footer, reload_s)),
        ("curves", "Curves", curves),
        ("samples", "Samples", macro(TEMPLATE, "samples", runs, newest(runs, "samples"))),
        (
            "settings",
            "Settings",
            macro(TEMPLATE, "settings", runs, differing[:MAX_DIFFERENT], hidden, equal, MAX_ATTEMPTS),
        ),
        ("experts", "Loads of experts", macro("experts.html", "drawings", loads)),
        ("scores", "Scores", scores_section(runs)),
        ("incidents", "Incidents", macro(TEMPLATE, "incidents", newest(runs, "incidents"))),
        ("checkpoints", "Checkpoints", macro(TEMPLATE, "checkpoints", newest(runs, "saves"))),
    ]
    title = f"Report: {', '.join(run.name for run in runs[:3])}" + (" …" if len(runs) > 3 else "")
    return page(title, sections, data={**data, "reload": reload_s})


def scores_section(runs: Sequence[RunRecords]) -> Markup:
    rows = list[tuple[object, ...]]()
    # Limit the receipts of a page with hundreds of them.
    longest = min(20_000, 300_000 // max(sum(len(run.scores) for run in runs), 1))
    for index, run in enumerate(runs):
        for file, result in run.scores:
            task, step = str(result.get("task", file.removesuffix(".json"))), result.get("step", MISSING)
            receipt = text(json.dumps(result, indent=1), longest) if longest >= 500 else ""
            for name, value in scores_of(result):
                rows.append((index, run.name, task, name, value, step, file, receipt))
                file, receipt = "", ""
    return macro(TEMPLATE, "scores", rows[:MAX_ROWS], len(rows))


def scores_of(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    scores = list[tuple[str, str]]()
    parts = result.get("results")
    for part in parts if isinstance(parts, list) else [result]:
        if not isinstance(part, dict):
            continue
        metrics, errors = part.get("metrics"), part.get("standard_errors")
        numbers = metrics if isinstance(metrics, dict) else {key: part[key] for key in SCORES if key in part}
        for name, value in numbers.items():
            split = f" ({part['split']})" if isinstance(part.get("split"), str) else ""
            error = number(errors.get(name)) if isinstance(errors, dict) else float("nan")
            spread = f" ± {error:.4f}" if error == error else ""
            scores.append((f"{name}{split}", f"{figure(number(value))}{spread}"))
    return scores or [(MISSING, MISSING)]


def newest(runs: Sequence[RunRecords], name: str) -> list[tuple[int, RunRecords, Mapping[str, Any]]]:
    """Return the newest records of each run's list `name`, with the run's index; at most MAX_ROWS."""
    most = max(MAX_ROWS // max(len(runs), 1), 1)
    return [
        (index, run, record) for index, run in enumerate(runs) for record in list(getattr(run, name))[-most:]
    ]


def draw_load(record: Mapping[str, Any]) -> Markup:
    """Draw a record of kind `experts` as a heat map: a row for each layer, a cell for each expert.

    A large model shows its least even layers. Empty for a damaged record.
    """
    counts = record.get("counts")
    rows = list[tuple[str, list[float]]]()
    for layer, tokens in counts.items() if isinstance(counts, dict) else ():
        loads = list(map(number, tokens)) if isinstance(tokens, list) else []
        total = sum(loads)
        if layer.isdecimal() and total > 0 and min(loads) >= 0:  # a NaN makes the sum one
            rows.append((layer, [load * len(loads) / total for load in loads]))
    if not rows:
        return Markup()
    most = max(1, 4096 // max(len(loads) for _, loads in rows))  # a cell has some 60 bytes
    uneven = sorted(rows, key=lambda row: -max(row[1]))[:most]
    shown = [row for row in rows if row in uneven]
    return macro("experts.html", "loads", record["step"], shown, len(rows) - len(shown))
