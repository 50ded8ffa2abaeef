"""The page of `mlm report`: the curves of runs, and every other part as HTML."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import mlm
from mlm.tracking.html.curves import MOST_POINTS, curves_of
from mlm.tracking.html.elements import Html, join, paragraph, text
from mlm.tracking.html.runs import Run
from mlm.tracking.html.shell import page
from mlm.tracking.page import drawings, parts
from mlm.tracking.page.drawings import Plans
from mlm.tracking.page.schedule import draw_schedule
from mlm.util.terminal import size

MOST_BYTES = 2_000_000
MOST_TEXT = 1_000_000
"""Bytes of all parts but the curves."""
FEWEST_POINTS = 1000
MOST_PLANS = 6
"""Different layouts whose drawings fit the page."""

SECTIONS = (
    *("runs", "curves", "samples", "settings", "layout", "schedule", "memory"),
    *("scores", "incidents", "checkpoints"),
)
"""Anchors in the order of the page."""


def make_page(runs: Sequence[Run], *, reload_s: float | None = None) -> bytes:
    """Return the page of some runs, of less than MOST_BYTES.

    With `reload_s` a browser loads it again after that many seconds.
    """
    parts_of_it = fitted(
        {
            "runs": ("Runs", join([paragraph(written_at(reload_s)), parts.overview(runs)])),
            "settings": ("Settings", parts.settings(runs)),
            **plans(runs),
            "samples": ("Samples", parts.samples(runs)),
            "scores": ("Scores", parts.scores(runs)),
            "incidents": ("Incidents", parts.incidents(runs)),
            "checkpoints": ("Checkpoints", parts.checkpoints(runs)),
        }
    )
    title = f"Report: {', '.join(run.name for run in runs[:3])}" + (" …" if len(runs) > 3 else "")
    most = MOST_POINTS
    while True:
        drawn, data = curves_of(runs, most)
        every = {**parts_of_it, "curves": ("Curves", drawn)}
        sections = [(name, *every[name]) for name in SECTIONS]
        found = page(title, sections, data={**data, "reload": reload_s})
        if len(found) < MOST_BYTES or most < FEWEST_POINTS:
            return found
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


def plans(runs: Sequence[Run]) -> dict[str, tuple[str, Html]]:
    """Return the parts on layouts, schedules and memory; equal ones of several runs once."""
    found: dict[str, dict[Html, list[str]]] = {"layout": {}, "schedule": {}, "memory": {}}
    for run in runs:
        its = Plans(run)
        if not run.layout:
            continue
        drawn = {
            "layout": drawings.draw_layout(its),
            "schedule": draw_schedule(its),
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
