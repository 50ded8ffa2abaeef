"""`mlm report`: read runs and write their page, once or while they train."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

import mlm
from mlm.launch.stop import Stopped, raise_stop_requests
from mlm.tracking.config import ReportConfig
from mlm.tracking.history import FILE_NAME
from mlm.tracking.page.command import choose
from mlm.tracking.page.html import MAX_POINTS, curves_of, figure, macro, page, paragraph, text
from mlm.tracking.page.pipeline import RunPlan, draw_layout, draw_loads, draw_memory, draw_schedule
from mlm.tracking.page.runs import CONFIG, MISSING, RESULT, RunRecords, names_of, number, read_run
from mlm.tracking.panel import duration
from mlm.tracking.summary import MAX_ATTEMPTS
from mlm.util.errors import escape_controls, show
from mlm.util.results import target_name, write_result
from mlm.util.terminal import Screen, format_bytes, one_line

TEMPLATE = "sections.html"
MAX_BYTES = 2_000_000
MAX_SECTION_BYTES = 1_000_000
"""Bytes of all sections but the curves."""
FEWEST_POINTS = 1000
MAX_DRAWINGS = 6
"""Different layouts whose drawings fit the page."""
MAX_DIFFERENT = 200
MAX_ROWS = 200
"""Rows of a table of incidents, checkpoints or scores, of all runs together."""
MAX_RECEIPTS = 300_000
"""Characters of all receipts."""
MAX_RECEIPT, MIN_RECEIPT = 20_000, 500
SCORES = (
    *("loss", "perplexity", "bits_per_byte", "accuracy", "adjusted_perplexity", "word_perplexity", "score"),
)
"""Numbers of a result without `metrics` that are scores."""

WATCHED = (FILE_NAME, CONFIG, "checkpoints", RESULT)

Sleep = Callable[[float], None]


def run(config: ReportConfig, console: Console | None = None, sleep: Sleep = time.sleep) -> int:
    """Write the page of some runs; return the exit code. Raises UserError, CorruptFileError."""
    console = console or Screen()
    chosen = choose(config.runs)
    for problem in chosen.skipped:
        print(f"mlm report: skipped: {escape_controls(problem)}", file=sys.stderr)
    reader = RunsReader(chosen.runs)
    if not config.watch:
        say(console, write_page(config, reader.read(), None))
        return 0
    with raise_stop_requests():
        try:
            watch(config, reader, console, sleep)
        except (KeyboardInterrupt, Stopped) as stop:
            if len(reader.runs) == len(reader.names):  # a page of some runs would replace an earlier one
                say(console, f"stopped; {write_page(config, reader.runs, None)}")
            if isinstance(stop, Stopped):
                return stop.exit_code
            raise
    say(console, f"all runs are finished; {write_page(config, reader.runs, None)}")
    return 0


def watch(config: ReportConfig, reader: "RunsReader", console: Console, sleep: Sleep) -> None:
    """Write the page, and a line for each run that has got further, until all are finished."""
    before = dict[str, int]()
    while True:
        runs = reader.read()
        is_over = all(run.is_finished for run in runs)
        write_page(config, runs, None if is_over else config.every_s)
        for each in runs:
            if before.get(each.name) != each.done:
                say(console, overview_line(each))
            before[each.name] = each.done
        if is_over:
            return
        sleep(config.every_s)


class RunsReader:
    """Reads runs, those again whose files have changed."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.names = dict(zip(folders, names_of(folders), strict=True))
        self.read_before: dict[str, tuple[object, RunRecords]] = {}

    @property
    def runs(self) -> list[RunRecords]:
        """The runs as they were read last."""
        return [run for _, run in self.read_before.values()]

    def read(self) -> list[RunRecords]:
        """Return the runs as they are now. Raises UserError, CorruptFileError."""
        for folder, name in self.names.items():
            now = list(stats_of(Path(folder)))
            if folder not in self.read_before or self.read_before[folder][0] != now:
                self.read_before[folder] = now, read_run(Path(folder), name)
        return self.runs


def stats_of(folder: Path) -> Iterator[tuple[object, ...]]:
    """Yield what changes when a file of a run's page does."""
    for path in [*(folder / name for name in WATCHED), *sorted(folder.glob("eval-*.json"))]:
        try:
            status = path.stat()
            yield path.name, status.st_size, status.st_mtime_ns, status.st_ino
        except OSError:
            yield (path.name,)


def write_page(config: ReportConfig, runs: Sequence[RunRecords], reload_s: float | None) -> str:
    """Write the page and return a line on it. Raises UserError."""
    content = make_page(runs, reload_s=reload_s)
    write_result(config.out, content, inputs=config.runs)
    return f"written to {target_name(config.out)} ({format_bytes(len(content))})"


def say(console: Console, line: str) -> None:
    """Print one line as it is."""
    console.print(Text(line), soft_wrap=True)


def make_page(runs: Sequence[RunRecords], *, reload_s: float | None = None) -> bytes:
    """Return the page of some runs, of less than MAX_BYTES.

    With `reload_s` a browser loads it again after that many seconds.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    drawings = draw_plans(runs)
    sections = fit_sections(
        [
            (
                "runs",
                "Runs",
                macro(TEMPLATE, "runs", runs, f"Written {now} by mlm {mlm.__version__}.", reload_s),
            ),
            ("curves", "Curves", Markup()),
            ("samples", "Samples", macro(TEMPLATE, "samples", runs, newest(runs, "samples"))),
            ("settings", "Settings", settings_section(runs)),
            ("layout", "Layout", drawings["layout"]),
            ("schedule", "Pipeline schedule", drawings["schedule"]),
            ("memory", "Memory by part", drawings["memory"]),
            ("experts", "Loads of experts", draw_loads(runs)),
            ("scores", "Scores", scores_section(runs)),
            ("incidents", "Incidents", macro(TEMPLATE, "incidents", newest(runs, "incidents"))),
            ("checkpoints", "Checkpoints", macro(TEMPLATE, "checkpoints", newest(runs, "saves"))),
        ]
    )
    title = f"Report: {', '.join(run.name for run in runs[:3])}" + (" …" if len(runs) > 3 else "")
    most = MAX_POINTS
    while True:
        curves, data = curves_of(runs, most)
        sections[1] = ("curves", "Curves", curves)
        content = page(title, sections, data={**data, "reload": reload_s})
        if len(content) < MAX_BYTES or most < FEWEST_POINTS:
            return content
        most //= 2


def fit_sections(sections: Sequence[tuple[str, str, Markup]]) -> list[tuple[str, str, Markup]]:
    """Return sections of at most MAX_SECTION_BYTES together; a line stands for each that is too large."""
    fitting = list(sections)
    sizes = [len(content.encode()) for _, _, content in sections]
    while sum(sizes) > MAX_SECTION_BYTES:
        largest = sizes.index(max(sizes))
        line = (
            f"This part would take {format_bytes(sizes[largest])} and is left out; name fewer runs to see it."
        )
        fitting[largest], sizes[largest] = (*fitting[largest][:2], paragraph(line)), 0
    return fitting


def settings_section(runs: Sequence[RunRecords]) -> Markup:
    """Return the settings in which runs differ, those that are equal and the commands."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    every = {
        key: [show(run.settings[key]) if key in run.settings else MISSING for run in runs] for key in keys
    }
    different = [[key, *values] for key, values in every.items() if len(set(values)) > 1]
    equal = [[key, values[0]] for key, values in every.items() if len(set(values)) == 1]
    hidden = max(len(different) - MAX_DIFFERENT, 0)
    return macro(TEMPLATE, "settings", runs, different[:MAX_DIFFERENT], hidden, equal, MAX_ATTEMPTS)


def draw_plans(runs: Sequence[RunRecords]) -> dict[str, Markup]:
    """Return the layouts, schedules and memory of runs; equal ones of several runs once."""
    draw = {"layout": draw_layout, "schedule": draw_schedule, "memory": draw_memory}
    drawn: dict[str, dict[Markup, list[str]]] = {name: {} for name in draw}
    for plan in (RunPlan(run) for run in runs if run.layout):
        for name, function in draw.items():
            if drawing := function(plan):
                drawn[name].setdefault(drawing, []).append(f"{plan.run.name} ({plan.name})")
    return {
        name: macro(TEMPLATE, "drawings", list(some.items())[:MAX_DRAWINGS], max(len(some) - MAX_DRAWINGS, 0))
        for name, some in drawn.items()
    }


def scores_section(runs: Sequence[RunRecords]) -> Markup:
    """Return the scores of evaluations, each with its receipt."""
    rows = list[tuple[object, ...]]()
    longest = min(MAX_RECEIPT, MAX_RECEIPTS // max(sum(len(run.scores) for run in runs), 1))
    for index, run in enumerate(runs):
        for file, result in run.scores:
            task, step = str(result.get("task", file.removesuffix(".json"))), result.get("step", MISSING)
            receipt = text(json.dumps(result, indent=1), longest) if longest >= MIN_RECEIPT else ""
            for name, value in scores_of(result):
                rows.append((index, run.name, task, name, value, step, file, receipt))
                file, receipt = "", ""
    return macro(TEMPLATE, "scores", rows[:MAX_ROWS], len(rows))


def scores_of(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the scores in a result, with their standard errors."""
    scores = list[tuple[str, str]]()
    parts = result.get("results")
    for part in parts if isinstance(parts, list) else [result]:
        if not isinstance(part, dict):
            continue
        errors, metrics = part.get("standard_errors"), part.get("metrics")
        known = metrics if isinstance(metrics, dict) else {key: part[key] for key in SCORES if key in part}
        for name, value in known.items():
            error = number(errors.get(name)) if isinstance(errors, dict) else float("nan")
            spread = f" ± {error:.4f}" if error == error else ""
            split = f" ({part['split']})" if isinstance(part.get("split"), str) else ""
            scores.append((f"{name}{split}", f"{figure(number(value))}{spread}"))
    return scores or [(MISSING, MISSING)]


def newest(runs: Sequence[RunRecords], name: str) -> list[tuple[int, RunRecords, Mapping[str, Any]]]:
    """Return the newest records of each run's list `name` with the run's index, as many as fit a table."""
    most = max(MAX_ROWS // max(len(runs), 1), 1)
    return [
        (index, run, record) for index, run in enumerate(runs) for record in list(getattr(run, name))[-most:]
    ]


def overview_line(run: RunRecords) -> str:
    """Return the newest numbers of a run as names and values."""
    words = [
        one_line(run.name),
        run.state,
        f"step {run.progress}",
        f"loss {figure(run.last('step', 'loss'))}",
    ]
    if len(run.column("validation", "loss")):
        words.append(f"validation {figure(run.last('validation', 'loss'))}")
    words += [f"tokens/s {figure(run.median('tokens_per_s'), '{:.0f}')}", f"left {time_left(run)}"]
    return "  ".join(words)


def time_left(run: RunRecords) -> str:
    """Return the time that the rest of a run takes at its median speed."""
    step_s = run.median("step_time_s")
    is_known = not run.is_finished and run.total is not None and step_s == step_s
    return duration(((run.total or 0) - run.done) * step_s) if is_known else MISSING
