"""Table of a sweep's runs: printed at its end, and kept beside the runs as sweep.md."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mlm.tracking.history import FILE_NAME, SWEEP_FILE
from mlm.tracking.panel import format_count
from mlm.tracking.runs import RunRecords, read_run
from mlm.tracking.summary import SUMMARY_MARK, is_summary
from mlm.tracking.summary import table as markdown_table
from mlm.util.errors import format_value
from mlm.util.files import write_atomic
from mlm.util.terminal import add_row, console, table

KILLED = 128
"""Exit codes from here on mean that a signal ended the run."""
STOPPED = "stopped"

Row = dict[str, Any]
"""One run of a sweep."""


def run_of(overrides: Iterable[str], out: str | None, exit_code: int | None) -> Row:
    """Return the row of a run from the metrics in its folder; exit_code None: the run was not started.

    Keys: settings (what the sweep varies), out, exit_code, state, and numbers where some were logged: step,
    total_steps, tokens_per_s (median), loss (last), loss_unit, validation_loss (last), best_validation_loss,
    best_step, and of a run on a task score (the best of its first metric) and metric.
    """
    pairs = (text.partition("=") for text in overrides)
    settings = {key.lstrip("+"): format_value(value) for key, _, value in pairs}
    row: Row = {"settings": settings, "out": out, "exit_code": exit_code}
    if out is None or exit_code is None:
        return {**row, "state": "not started" if exit_code is None else state_of(exit_code, {})}
    seeds = sorted(Path(out).glob(f"seed-*/{FILE_NAME}"))
    files = [file for file in (Path(out, FILE_NAME), *seeds) if file.is_file()]
    parts = [numbers_of(read_run(file.parent, file.parent.name)) for file in files]
    by_key = {key: [part[key] for part in parts if key in part] for part in parts for key in part}
    numbers = {  # medians over seeds; the first of texts
        key: median(values) if all(isinstance(value, int | float) for value in values) else values[0]
        for key, values in by_key.items()
    }
    if (Path(out) / "result.json").is_file():  # patience may end a run on a task before its last step
        numbers.pop("total_steps", None)
    return {**row, "state": state_of(exit_code, numbers), **numbers}


def state_of(exit_code: int, numbers: Mapping[str, Any]) -> str:
    if exit_code:
        return "interrupted" if exit_code >= KILLED else "failed"
    return STOPPED if numbers.get("step", 0) < numbers.get("total_steps", 0) else "finished"


def numbers_of(run: RunRecords) -> dict[str, Any]:
    best, validations = run.lowest("validation", "loss"), run.tables.get("validation", {})
    metric = next((key for key in run.best if key not in ("kind", "time", "step", "split")), None)
    best_step, errors = run.best.get("step"), run.latest.get("less_is_better")
    is_error = isinstance(errors, list) and metric in errors
    if best_step is None and best == best:
        best_step = int(validations["step"][np.nanargmin(validations["loss"])])
    numbers = {
        "step": run.done,
        "total_steps": run.total,
        "tokens_per_s": run.median("tokens_per_s"),
        "loss": run.last("step", "loss"),
        "loss_unit": run.latest.get("loss_unit"),
        "validation_loss": run.last("validation", "loss"),
        "best_validation_loss": best,
        "best_step": best_step,
        "metric": metric and f"{run.best['split']} {metric}",
        "score": run.best.get(metric) if metric else None,
        "better": metric and ("less" if is_error else "more"),
    }
    return {key: value for key, value in numbers.items() if value is not None and value == value}


def best_of(runs: Sequence[Row]) -> Row | None:
    """Return the run with the best score, or else the lowest validation loss; None if there is none.

    Runs that failed count too if they have one: their best checkpoint may be kept.
    """
    if scored := [run for run in runs if "score" in run]:
        return (min if scored[0].get("better") == "less" else max)(
            scored, key=lambda run: float(run["score"])
        )
    validated = [run for run in runs if "best_validation_loss" in run]
    return min(validated, key=lambda run: float(run["best_validation_loss"]), default=None)


def cells(runs: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows, without empty columns; a heading that ends in "#" is of numbers."""
    best, keys = best_of(runs), list(dict.fromkeys(key for run in runs for key in run["settings"]))
    has_validation = any("validation_loss" in run for run in runs)
    metric = next((run["metric"] for run in runs if "metric" in run), None)
    columns = [
        ("loss", "loss#", "{:.4f}".format),
        ("validation_loss", "loss#", "{:.4f}".format),
        ("best_validation_loss", "best#", "{:.4f}".format),
        ("score", f"best {metric}#", "{:.4f}".format),
        ("best_step", "at step#", "{:,.0f}".format),
        ("tokens_per_s", "tokens/s#", format_count),
    ]
    shown = [
        (key, heading, form)
        for key, heading, form in columns
        if any(key in run for run in runs) and not (key == "loss" and has_validation)
    ]
    headings = ["", *keys, *(heading for _, heading, _ in shown), "state", "folder"]
    rows = [
        [
            "best" if run is best else "",
            *(run["settings"].get(key, "") for key in keys),
            *(form(run[key]) if key in run else "" for key, _, form in shown),
            state_in_words(run),
            run["out"] or "",
        ]
        for run in runs
    ]
    return headings, rows


def title(runs: Sequence[Row]) -> str:
    kind = "validation" if any("validation_loss" in run for run in runs) else "training"
    unit = next((f" · {kind} loss in {run['loss_unit']}" for run in runs if "loss_unit" in run), "")
    return f"sweep of {len(runs)} runs{unit.replace('in per', 'per')}"


def state_in_words(run: Row) -> str:
    if run["state"] == STOPPED:
        return f"{STOPPED} after step {run['step']:,.0f} of {run['total_steps']:,.0f}"
    return f"{run['state']} (exit code {run['exit_code']})" if run["exit_code"] else str(run["state"])


def report_sweep(runs: Sequence[Row]) -> None:
    """Print the table, and write it beside runs that share a folder, unless a user's file is in the way."""
    headings, rows = cells(runs)
    grid = table(title(runs), *headings)
    for row in rows:
        add_row(grid, *row)
    screen = console()
    # a row is a line, however wide
    widest = screen.measure(grid, options=screen.options.update(max_width=1000)).maximum
    screen.width = max(screen.width, widest)
    screen.print(grid)
    folders = {Path(run["out"]).parent for run in runs if run["out"]}
    if len(folders) != 1:
        return
    file = folders.pop() / SWEEP_FILE
    if os.path.lexists(file) and not is_summary(file):
        screen.print(f"{file} was not written by mlm: the table is not kept")
        return
    body = markdown_table(rows, [heading.removesuffix("#") for heading in headings])
    try:
        write_atomic(file, f"{SUMMARY_MARK}\n\n# Sweep\n\n{title(runs).capitalize()}.\n\n{body}\n".encode())
    except OSError as error:
        screen.print(f"{file}: {error.strerror}: the table is not kept")
    else:
        screen.print(f"written to {file}")
