"""Curves of runs on a page: loss, throughput and every other number that they logged, overlaid.

The script `assets/curves.js` draws them with uPlot, from data that this module thins.
"""

from collections.abc import Sequence
from typing import Any

from mlm.tracking.html.elements import Html, join, paragraph, text
from mlm.tracking.html.rows import thin
from mlm.tracking.html.runs import AXES, NOT_CURVES, Run

MOST_POINTS = 30_000
"""Points of all curves together, about 36 bytes each."""
FEWEST = 25
"""Points of a curve that are always kept."""
MOST_CHARTS = 40
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


def curves_of(runs: Sequence[Run], most_points: int = MOST_POINTS) -> tuple[Html, dict[str, Any]]:
    """Return the charts of some runs for a section of a page, and the page's `data` that they are drawn from.

    A page has one such section. It is empty if no run has logged a number.
    """
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
    drawn = join([Html(CONTROLS), paragraph(*lines)]) if charts else Html()
    return drawn, {
        "runs": [{"name": run.name, "curves": its} for run, its in zip(runs, found, strict=True)],
        "charts": [
            {"key": f"{kind}:{name}", "title": title, "unit": unit if name == "loss" else its_unit}
            for kind, name, title, its_unit in charts
        ],
    }


def swatch(index: int) -> Html:
    """Return the line of a run, as its curves are drawn; the page's script fills it."""
    return Html(f'<svg class="swatch" data-run="{index}" viewBox="0 0 34 8" aria-hidden="true"></svg>')


def named(index: int, run: Run) -> Html:
    """Return the name of the run at `index` of the page's data, after its line."""
    return Html(f"{swatch(index)} {text(run.name)}")
