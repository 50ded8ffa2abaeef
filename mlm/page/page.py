"""The page: every run's curves as data, every other part as HTML, and the script that draws; one file."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

import mlm
from mlm.files.results import HTML_MARK
from mlm.page import drawings, parts
from mlm.page.drawings import Plans
from mlm.page.html import Html, embedded, join, paragraph, section, text
from mlm.page.rows import thin
from mlm.page.runs import AXES, NOT_CURVES, Run
from mlm.terminal import size

MOST_BYTES = 2_000_000
MOST_POINTS = 30_000
"""Points of all curves together, about 36 bytes each."""
MOST_TEXT = 1_000_000
"""Bytes of all parts but the curves."""
FEWEST = 25
"""Points of a curve that are always kept."""
FEWEST_POINTS = 1000
MOST_CHARTS = 40
MOST_PLANS = 6
"""Different layouts whose drawings fit the page."""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"

CHARTS: tuple[tuple[str, str, str, str], ...] = (
    ("step", "loss", "Training loss", ""),
    ("validation", "loss", "Validation loss", ""),
    ("step", "grad_norm", "Gradient norm", "L2, before clipping"),
    ("step", "lr", "Learning rate", ""),
    ("step", "tokens_per_s", "Throughput", "tokens per second, all ranks"),
    ("step", "memory_gib", "Memory", "GiB, rank 0"),
)
"""Record, name, title and unit of the charts that come first."""
OTHER_COLUMNS = frozenset(
    (
        "loss_scale",
        "skipped_steps",
        "step_time_s",
        "tflops",
        "mfu",
        "perplexity",
        "epoch",
        "examples_per_s",
        "memory_bytes",
    )
)
"""Numbers that no chart shows: they follow from others, or are seldom of interest."""


@cache
def asset(name: str) -> str:
    """Return a file of the package, of this page alone."""
    return (files("mlm.page") / "assets" / name).read_text("utf-8")


def make_page(runs: Sequence[Run], *, reload_s: float | None = None) -> bytes:
    """Return the page of some runs, of less than MOST_BYTES.

    With `reload_s` a browser loads it again after that many seconds.
    """
    parts_of_it = fitted(
        {
            "runs": ("Runs", join([paragraph(written_at(reload_s)), parts.overview(runs)])),
            "settings": ("Settings", parts.settings(runs)),
            **plans(runs),
            "scores": ("Scores", parts.scores(runs)),
            "incidents": ("Incidents", parts.incidents(runs)),
            "checkpoints": ("Checkpoints", parts.checkpoints(runs)),
        }
    )
    most = MOST_POINTS
    while True:
        page = assemble(runs, parts_of_it, most, reload_s).encode()
        if len(page) < MOST_BYTES or most < FEWEST_POINTS:
            return page
        most //= 2


def written_at(reload_s: float | None) -> str:
    """Return a line on when the page was written."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    state = f"Written {now} by mlm {mlm.__version__}."
    if reload_s is not None:
        state += f" The page reloads every {reload_s:g} seconds while `mlm report watch=true` runs."
    return state


def fitted(found: Mapping[str, tuple[str, Html]]) -> dict[str, tuple[str, Html]]:
    """Return parts of at most MOST_TEXT bytes together; a line stands for each that is too large."""
    fitting = dict(found)
    sizes = {name: len(content.encode()) for name, (_, content) in found.items()}
    while sum(sizes.values()) > MOST_TEXT:
        name = max(sizes, key=lambda name: sizes[name])
        line = f"This part would take {size(sizes[name])} and is left out; name fewer runs to see it."
        fitting[name], sizes[name] = (fitting[name][0], paragraph(line)), 0
    return fitting


def assemble(
    runs: Sequence[Run],
    found: Mapping[str, tuple[str, Html]],
    most_points: int,
    reload_s: float | None,
) -> str:
    """Return the page with at most so many points of curves."""
    title = f"Report: {', '.join(run.name for run in runs[:3])}" + (" …" if len(runs) > 3 else "")
    data, notes = curves(runs, most_points)
    drawn = join([Html(CONTROLS), paragraph(*notes)]) if data["charts"] else Html()
    parts_of_it = {**found, "curves": ("Curves", drawn)}
    content = join(section(name, *parts_of_it[name]) for name in SECTIONS)
    licence = f"<!-- uPlot, in this page:\n{asset('uPlot.LICENSE')}-->"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{HTML_MARK}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n{licence}\n"
        f"<style>{asset('uPlot.min.css')}\n{asset('report.css')}</style></head>\n"
        f'<body><a class="skip" href="#runs">Skip to the runs</a>\n<header><h1>{text(title)}</h1>'
        f"{navigation(content)}</header>\n<main>\n{content}</main>\n"
        f"{embedded('data', {**data, 'reload': reload_s})}"
        f"<script>{asset('uPlot.iife.min.js')}</script>\n<script>{asset('report.js')}</script>\n"
        "</body></html>\n"
    )


def navigation(content: str) -> Html:
    """Return links to the sections that a page has."""
    links = [
        f'<a href="#{name}">{name.capitalize()}</a>'
        for name in SECTIONS
        if f'<section id="{name}">' in content
    ]
    return Html(f'<nav aria-label="sections">{" ".join(links)}</nav>')


SECTIONS = (
    *("runs", "curves", "settings", "layout", "schedule", "memory"),
    *("scores", "incidents", "checkpoints"),
)
CONTROLS = """<noscript><p>The curves need JavaScript; the tables do not.</p></noscript>
<form id="controls" aria-label="curves">
<fieldset><legend>over</legend>
<label><input type="radio" name="axis" value="step" checked> steps</label>
<label><input type="radio" name="axis" value="tokens"> tokens</label>
<label><input type="radio" name="axis" value="time"> time</label></fieldset>
<label>smoothing <input type="range" name="smooth" min="0" max="0.99" step="0.01" value="0">
<output>0</output></label>
<label><input type="checkbox" name="log"> logarithmic</label>
<button type="button" name="reset">whole range</button>
<fieldset id="shown"><legend>runs</legend></fieldset>
</form>
<p class="small">Drag to zoom, double-click for the whole range. With a chart in focus: left and right move
along the curve, + and − zoom, Escape shows the whole range.</p>
<div id="charts"></div>
"""


def charts_of(runs: Sequence[Run]) -> list[tuple[str, str, str, str]]:
    """Return the charts that any of the runs has values for: the usual ones, then parts and scores."""
    known = {(kind, name) for kind, name, _, _ in CHARTS}
    further = list[tuple[str, str, str, str]]()
    for run in runs:
        for kind, table in run.tables.items():
            for name in table:
                if name in NOT_CURVES or name in OTHER_COLUMNS or (kind, name) in known:
                    continue
                known.add((kind, name))
                place = {"step": "training"}.get(kind, kind.partition("/")[2] or "validation")
                label = name.removeprefix("validation/").replace("_", " ")
                further.append((kind, name, f"{label}, {place}", ""))
    found = [chart for chart in (*CHARTS, *further) if any(len(run.column(*chart[:2])) for run in runs)]
    return found[:MOST_CHARTS]


def curves(runs: Sequence[Run], most_points: int) -> tuple[dict[str, Any], list[str]]:
    """Return the data of the page's script, and lines on what it leaves out."""
    charts = charts_of(runs)
    present = sum(bool(len(run.column(kind, name))) for run in runs for kind, name, _, _ in charts)
    most = max(most_points // max(present, 1), FEWEST)
    found, thinned = [dict[str, Any]() for _ in runs], dict[str, int]()
    for kind, name, _, _ in charts:
        for run, its in zip(runs, found, strict=True):
            table = run.tables.get(kind, {})
            if not len(run.column(kind, name)):
                continue
            x = {axis: table[axis] for axis in AXES if axis in table}
            curve = thin(x, table[name], most)
            its[f"{kind}:{name}"] = curve.encode()
            if curve.bucket > 1:
                thinned[run.name] = max(thinned.get(run.name, 0), curve.bucket)
    units = {
        str(run.latest["loss_unit"])[:80] for run in runs if isinstance(run.latest.get("loss_unit"), str)
    }
    unit = units.pop() if len(units) == 1 else ""
    lines = [
        f"Of {name}, every {bucket} logged steps are drawn as their first, last, lowest and highest value, "
        "so that no extreme is lost; smoothed curves begin from the mean of each such group. "
        for name, bucket in thinned.items()
    ]
    return {
        "runs": [{"name": run.name, "curves": its} for run, its in zip(runs, found, strict=True)],
        "charts": [
            {"key": f"{kind}:{name}", "title": title, "unit": unit if name == "loss" else its_unit}
            for kind, name, title, its_unit in charts
        ],
    }, lines


def plans(runs: Sequence[Run]) -> dict[str, tuple[str, Html]]:
    """Return the parts on layouts, schedules and memory; equal ones of several runs once."""
    found: dict[str, dict[Html, list[str]]] = {"layout": {}, "schedule": {}, "memory": {}}
    for run in runs:
        its = Plans(run)
        if not run.layout:
            continue
        drawn = {
            "layout": drawings.draw_layout(its),
            "schedule": drawings.draw_schedule(its),
            "memory": drawings.draw_memory(its),
        }
        for kind, drawing in drawn.items():
            if drawing:
                title = f"{run.name} ({drawings.layout_name(its)})"
                found[kind].setdefault(drawing, []).append(title)
    titles = {"layout": "Layout", "schedule": "Pipeline schedule", "memory": "Memory by part"}
    return {kind: (titles[kind], join(each_once(some))) for kind, some in found.items()}


def each_once(drawn: dict[Html, list[str]]) -> list[Html]:
    """Return drawings below the names of their runs, the first few."""
    shown = [
        join([Html(f"<h3>{text(', '.join(names), 1000)}</h3>\n"), drawing])
        for drawing, names in list(drawn.items())[:MOST_PLANS]
    ]
    left = len(drawn) - len(shown)
    return [*shown, *([paragraph(f"{left} further ones differ and are not drawn.")] if left else [])]
