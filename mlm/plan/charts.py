"""Planned layouts as a picture, and as a page that holds the picture and the tables.

Bars are told apart by shade and hatching, so that they read without colour.
"""

from collections.abc import Sequence
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mlm.plan.memory import GIB
from mlm.plan.memory import PARTS as MEMORY_PARTS
from mlm.plan.report import TIME_COLUMNS, Row
from mlm.plan.search import LayoutForecast
from mlm.tracking.page.html import block, image, page, table
from mlm.util.results import CREATOR

INK = "#333333"
LOOKS = (
    ("#1f4e79", ""),
    ("#9dc3e6", "///"),
    ("#f4b183", ""),
    ("#c55a11", "xx"),
    ("#ffe699", ".."),
    ("#548235", ""),
    ("#a9d18e", "\\\\\\"),
    ("#7f7f7f", "++"),
    ("#e8e8e8", ""),
)
"""Fill and hatching of the parts of a bar, neighbours far apart in lightness."""


def draw(forecasts: Sequence[LayoutForecast], title: str, capacity: float) -> bytes:
    """The picture as PNG: time and memory of each layout."""
    height = 0.34 * len(forecasts) + 1.5
    figure = Figure(figsize=(12, 2 * height), dpi=110, layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    time, memory = figure.subplots(2, 1)
    names = [forecast.layout.label for forecast in forecasts]
    rows = [[sum(p.step.parts[name] for name in parts) for p in forecasts] for _, parts in TIME_COLUMNS]
    bars(time, names, [heading for heading, _ in TIME_COLUMNS], rows, "seconds per step")
    sizes = [[forecast.memory.parts[part] / GIB for forecast in forecasts] for part in MEMORY_PARTS]
    bars(memory, names, MEMORY_PARTS, sizes, "GiB of the fullest GPU", limit=capacity / GIB)
    file = BytesIO()
    figure.savefig(file, format="png", metadata={"Software": CREATOR})
    return file.getvalue()


def bars(
    axes: Axes,
    names: Sequence[str],
    parts: Sequence[str],
    rows: Sequence[Sequence[float]],
    unit: str,
    *,
    limit: float | None = None,
) -> None:
    """Stacked horizontal bars, one for each name; parts that none has are left out."""
    left = [0.0] * len(names)
    whole = max(map(sum, zip(*rows, strict=True)))
    for (fill, hatch), part, row in zip(LOOKS, parts, rows, strict=False):
        if max(row) < 1e-3 * whole:
            continue
        axes.barh(
            range(len(names)),
            row,
            left=left,
            label=part,
            color=fill,
            hatch=hatch,
            edgecolor="white",
            height=0.75,
        )
        left = [start + length for start, length in zip(left, row, strict=True)]
    if limit is not None:
        axes.axvline(limit, color=INK, linestyle="--", linewidth=1)
        axes.annotate(
            f"{limit:.0f} GiB",
            (limit, 1.0),
            xycoords=("data", "axes fraction"),
            ha="right",
            va="bottom",
            fontsize=8,
        )
    axes.set_yticks(range(len(names)), [f"{n}  {name}" for n, name in enumerate(names, start=1)], fontsize=8)
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    frame(axes, unit)


def frame(axes: Axes, unit: str) -> None:
    """Axis label and quiet spines."""
    axes.set_xlabel(unit, fontsize=8, color=INK)
    axes.tick_params(colors=INK, labelsize=8, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def layouts_page(title: str, picture: bytes, rows: Sequence[Row], lines: Sequence[str]) -> bytes:
    """Return a page without anything to load: the picture, every number, and lines below them."""
    columns = (
        ("layout", "layout", str),
        ("step, s", "step_s", "{:.4g}".format),
        ("tokens/s", "tokens_per_s", "{:,.0f}".format),
        ("model TFLOP/s", "model_tflops", "{:.1f}".format),
        ("hardware TFLOP/s", "hardware_tflops", "{:.1f}".format),
        ("MFU", "mfu", "{:.1%}".format),
        ("memory, GiB", "memory_bytes", lambda size: f"{size / GIB:.1f}"),
        ("bubble", "bubble", "{:.1%}".format),
        ("days", "days", "{:.3g}".format),
        ("MWh", "energy_mwh", "{:.3g}".format),
        ("price", "price", "{:,.0f}".format),
    )
    shown = [column for column in columns if rows[0][column[1]] is not None]
    numbers = table(
        ["#", *(heading for heading, _, _ in shown)],
        [[n, *(form(row[key]) for _, key, form in shown)] for n, row in enumerate(rows, start=1)],
    )
    return page(
        title,
        [
            ("time", "Time and memory", image(picture, "time and memory of each layout")),
            ("layouts", "Layouts", numbers),
            ("notes", "Notes", block("\n".join(lines))),
        ],
    )
