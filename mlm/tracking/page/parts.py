"""Tables of a page: the runs, their settings, scores, incidents and checkpoints."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from mlm.tracking.html.curves import named
from mlm.tracking.html.elements import Html, block, details, join, paragraph, table, text
from mlm.tracking.html.rows import number
from mlm.tracking.html.runs import Run
from mlm.tracking.panel import duration
from mlm.tracking.summary import MOST_ATTEMPTS
from mlm.util.errors import show

MISSING = "–"
MOST_DIGITS = 1e6  # from here on a loss is shown with an exponent
MOST_DIFFERENT = 200
MOST_SHOWN = 200
"""Rows of a table of incidents, checkpoints or scores, of all runs together."""
MOST_RECEIPTS = 300_000
"""Characters of all receipts."""
LONGEST_RECEIPT, SHORTEST_RECEIPT = 20_000, 500
LONGEST_SAMPLE = 4_000
LONGEST_COMMAND = 10_000
"""Characters of a command: it is to be copied whole."""
MOST_PROBLEMS = 5
"""Files of a run that are named as damaged."""


def figure(value: float, form: str = "{:.4f}") -> str:
    """Return a number, or a dash for none."""
    if abs(value) >= MOST_DIGITS and form == "{:.4f}":
        form = "{:.4g}"
    return form.format(value) if value == value else MISSING


def overview(runs: Sequence[Run]) -> Html:
    """Return a row on each run."""
    rows = [
        [
            named(index, run),
            state(run),
            progress(run),
            figure(last(run, "step", "loss")),
            figure(last(run, "validation", "loss")),
            figure(lowest(run, "validation", "loss")),
            figure(last(run, "step", "tokens"), "{:,.0f}"),
            figure(middle(run, "tokens_per_s"), "{:,.0f}"),
            figure(100 * middle(run, "mfu"), "{:.1f} %"),
            figure(highest(run, "step", "memory_gib"), "{:.2f}"),
            duration(run.seconds),
        ]
        for index, run in enumerate(runs)
    ]
    numbers = ["steps", "loss", "validation", "best", "tokens", "tokens/s", "MFU", "GiB", "time"]
    notes = [note for run in runs for note in notes_on(run)]
    listed = Html(f"<ul>{join(Html(f'<li>{text(note)}</li>') for note in notes)}</ul>") if notes else Html()
    return join(
        [table(["run", "state", *numbers], rows), Html('<p class="small">' + text(UNITS) + "</p>"), listed]
    )


UNITS = (
    "loss, validation: the last logged; best: the lowest validation loss; tokens/s and MFU: medians; GiB: "
    "the most that rank 0 logged; time: h:mm:ss, without the breaks between attempts."
)


def notes_on(run: Run) -> list[str]:
    """Return lines on what a reader must know of a run's files."""
    found = [f"{run.name}: {problem}" for problem in run.problems[:MOST_PROBLEMS]]
    if len(run.problems) > MOST_PROBLEMS:
        found.append(f"{run.name}: {len(run.problems) - MOST_PROBLEMS} further files are damaged")
    if run.failure:
        found.append(f"{run.name}: failed at step {run.done:,}: {run.failure}")
    if run.damaged:
        found.append(f"{run.name}: {run.damaged:,} damaged lines of metrics.jsonl are left out")
    if not len(run.column("step", "step")):
        found.append(f"{run.name}: no step is logged yet")
    elif not len(run.column("validation", "loss")) and run.command != "finetune":
        found.append(f"{run.name}: no validation is logged")
    table_of = run.tables.get("step", {})
    for name in ("loss", "grad_norm"):
        lost = len(table_of.get(name, ())) - len(run.column("step", name))
        if lost:
            found.append(f"{run.name}: {lost:,} values of {name} are not finite; their curve has gaps there")
    return found


def progress(run: Run) -> str:
    """Return the steps done, of those to take."""
    return f"{run.done:,}" + (f" of {run.total:,}" if run.total else "")


def state(run: Run) -> str:
    """Return failed, finished, running since a time, stopped, or not started.

    A run that a signal or a lost host ended is stopped, as one that was asked to stop.
    """
    if run.failure:
        return "failed"
    if run.is_finished:
        return "finished"
    if run.is_held:
        return f"running since {when(run.latest.get('time'))[:16]}"
    return "stopped" if run.attempts or run.done else "not started"


def last(run: Run, kind: str, name: str) -> float:
    """Return the newest number of a column; NaN without one."""
    column = run.column(kind, name)
    return float(column[-1]) if len(column) else float("nan")


def lowest(run: Run, kind: str, name: str) -> float:
    """Return the least number of a column; NaN without one."""
    column = run.column(kind, name)
    return float(column.min()) if len(column) else float("nan")


def highest(run: Run, kind: str, name: str) -> float:
    """Return the largest number of a column; NaN without one."""
    column = run.column(kind, name)
    return float(column.max()) if len(column) else float("nan")


def middle(run: Run, name: str) -> float:
    """Return the median of a step's number; NaN without one."""
    column = run.column("step", name)
    return float(np.median(column)) if len(column) else float("nan")


def settings(runs: Sequence[Run]) -> Html:
    """Return the settings in which runs differ, and those that are equal behind a title."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    every = {
        key: [show(run.settings[key]) if key in run.settings else MISSING for run in runs] for key in keys
    }
    different = [[key, *values] for key, values in every.items() if len(set(values)) > 1]
    equal = [[key, values[0]] for key, values in every.items() if len(set(values)) == 1]
    parts = [table(["key", *(run.name for run in runs)], different[:MOST_DIFFERENT])]
    if len(different) > MOST_DIFFERENT:
        parts.append(paragraph(f"{len(different) - MOST_DIFFERENT:,} further keys differ."))
    if equal:
        title = "Settings that are equal" if len(runs) > 1 else "All settings"
        parts.append(details(f"{title} ({len(equal)})", table(["key", "value"], equal)))
    return join([*parts, *map(commands, runs)])


def commands(run: Run) -> Html:
    """Return the commands of a run's attempts, with time, host and versions."""
    rows = []
    for attempt in list(run.attempts)[-MOST_ATTEMPTS:]:
        words = attempt.get("command")
        versions = attempt.get("versions")
        rows.append(
            [
                f"step {attempt['start_step']:,}",
                when(attempt.get("time")),
                str(attempt.get("host", MISSING)),
                text(shlex.join(map(str, words)), LONGEST_COMMAND) if isinstance(words, list) else MISSING,
                show(versions) if isinstance(versions, dict) else MISSING,
            ]
        )
    found = table(["from", "started", "host", "command", "versions"], rows)
    return details(f"Commands of {run.name}", found) if found else Html()


def when(seconds: object) -> str:
    """Return a Unix time as text."""
    try:
        return datetime.fromtimestamp(number(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return MISSING


def scores(runs: Sequence[Run]) -> Html:
    """Return the scores of evaluations, each with its receipt."""
    rows = list[list[object]]()
    longest = min(LONGEST_RECEIPT, MOST_RECEIPTS // max(sum(len(run.scores) for run in runs), 1))
    for index, run in enumerate(runs):
        for file, result in run.scores:
            task = str(result.get("task", file.removesuffix(".json")))
            receipt = text(file)
            if longest >= SHORTEST_RECEIPT:
                receipt = details(file, block(json.dumps(result, indent=1), longest))
            for name, value in numbers_of(result):
                rows.append([named(index, run), task, name, value, f"{result.get('step', MISSING)}", receipt])
                receipt = Html()
    return shown(["run", "task", "metric", "score", "step", "receipt"], rows)


def shown(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    """Return a table of the first rows, with the number of the others."""
    left = len(rows) - MOST_SHOWN
    caption = f"The first {MOST_SHOWN} of {len(rows)} rows." if left > 0 else ""
    return table(headings, rows[:MOST_SHOWN], caption)


def newest(records: Iterable[Mapping[str, Any]], runs: Sequence[Run]) -> list[Mapping[str, Any]]:
    """Return the newest records of a run, as many as its share of a table."""
    return list(records)[-max(MOST_SHOWN // len(runs), 1) :]


def numbers_of(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the scores in a result, with their standard errors."""
    found = list[tuple[str, str]]()
    parts = result.get("results")
    for part in parts if isinstance(parts, list) else [result]:
        if not isinstance(part, dict):
            continue
        errors = part.get("standard_errors")
        metrics = part.get("metrics")
        known = metrics if isinstance(metrics, dict) else {key: part[key] for key in SCORES if key in part}
        for name, value in known.items():
            error = number(errors.get(name)) if isinstance(errors, dict) else float("nan")
            spread = f" ± {error:.4f}" if error == error else ""
            split = f" ({part['split']})" if isinstance(part.get("split"), str) else ""
            found.append((f"{name}{split}", f"{figure(number(value))}{spread}"))
    return found or [(MISSING, MISSING)]


SCORES = (
    "loss",
    "perplexity",
    "bits_per_byte",
    "accuracy",
    "adjusted_perplexity",
    "word_perplexity",
    "score",
)
"""Numbers of a result without `metrics` that are scores."""


def samples(runs: Sequence[Run]) -> Html:
    """Return what each run wrote at its newest validation, and at earlier ones behind a title."""
    parts = list[Html]()
    headings = ["step", "prompt", "continuation"]
    for index, run in enumerate(runs):
        by_step: dict[int, list[list[object]]] = {}
        for record in newest(run.samples, runs):
            texts = (written(str(record.get(key, ""))) for key in ("prompt", "text"))
            by_step.setdefault(record["step"], []).append([f"{record['step']:,}", *texts])
        every = [by_step[step] for step in sorted(by_step, reverse=True)]
        if every:
            parts += [Html(f"<h3>{named(index, run)}</h3>\n"), table(headings, every[0])]
        if earlier := [row for rows in every[1:] for row in rows]:
            title = f"Earlier samples of {run.name} ({len(earlier)})"
            parts.append(details(title, table(headings, earlier)))
    return join(parts)


def written(content: str) -> Html:
    """Return a text with its line ends."""
    return Html(f'<span style="white-space: pre-wrap">{text(content, LONGEST_SAMPLE)}</span>')


def incidents(runs: Sequence[Run]) -> Html:
    """Return incidents and returns to a checkpoint."""
    rows = []
    for index, run in enumerate(runs):
        for record in newest(run.incidents, runs):
            kinds = record.get("kinds")
            what = ", ".join(map(str, kinds)) if isinstance(kinds, list) else "returned to a checkpoint"
            lines = record.get("lines")
            more = [str(record[key]) for key in ("action", "folder") if record.get(key)]
            more += [f"from step {record['from']}"] if "from" in record else []
            more += map(str, lines) if isinstance(lines, list) else []
            loss, norm = number(record.get("loss")), number(record.get("grad_norm"))
            rows.append(
                [
                    named(index, run),
                    str(record.get("at", record["step"])),
                    what,
                    figure(loss),
                    figure(norm),
                    "; ".join(more),
                ]
            )
    return table(["run", "step", "incident", "loss", "gradient norm", "action and folder"], rows)


def checkpoints(runs: Sequence[Run]) -> Html:
    """Return the checkpoints that were written, and those that failed."""
    rows = []
    for index, run in enumerate(runs):
        for record in newest(run.saves, runs):
            name = str(record.get("path", "")).rpartition("/")[2]
            there = "there" if name in run.kept else "deleted since"
            state = str(record.get("error")) if record["kind"] == "save_failed" else there
            rows.append(
                [
                    named(index, run),
                    f"{record['step']:,}",
                    when(record.get("time")),
                    figure(number(record.get("seconds")), "{:.2f}"),
                    figure(number(record.get("waited")), "{:.2f}"),
                    state,
                ]
            )
    return table(["run", "step", "written", "seconds", "training waited, s", "state"], rows)
