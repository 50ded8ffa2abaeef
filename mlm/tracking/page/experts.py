"""The loads of a mixture's experts as a heat map for a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from mlm.tracking.page.html import macro
from mlm.tracking.runs import RunRecords, number

TEMPLATE = "experts.html"
MAX_CELLS = 4096
"""Experts of all layers that are drawn, some 60 bytes each."""


def draw_loads(runs: Sequence[RunRecords]) -> Markup:
    """Draw the newest loads of each run that has experts. Empty without any."""
    drawn = [(drawing, run.name) for run in runs for record in run.loads if (drawing := draw_load(record))]
    return macro(TEMPLATE, "drawings", drawn)


def draw_load(record: Mapping[str, Any]) -> Markup:
    """Draw a record of kind `experts` as a heat map: a row for each layer, a cell for each expert.

    Of a large model the least even layers; empty for a damaged record.
    """
    counts = record.get("counts")
    rows = [row for each in counts.items() if (row := load_row(*each))] if isinstance(counts, dict) else []
    if not rows:
        return Markup()
    most = max(1, MAX_CELLS // max(len(loads) for _, loads in rows))
    uneven = sorted(rows, key=lambda row: -max(row[1]))[:most]
    shown = [row for row in rows if row in uneven]
    return macro(TEMPLATE, "loads", record["step"], shown, len(rows) - len(shown))


def load_row(layer: str, counts: object) -> tuple[str, list[float]] | None:
    """Return a layer's number and the loads of its experts over their mean; None if they are damaged."""
    loads = list(map(number, counts)) if isinstance(counts, list) else []
    total = sum(loads)
    is_sound = layer.isdecimal() and total > 0 and min(loads) >= 0  # a NaN makes the sum one
    return (layer, [load * len(loads) / total for load in loads]) if is_sound else None
