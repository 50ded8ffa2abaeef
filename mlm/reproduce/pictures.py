"""Charts of a conclusion as SVG and PNG: our numbers solid, published ones dashed, spread as error bars."""

from collections.abc import Sequence
from io import BytesIO

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from mlm.reproduce.conclusion import Chart, Series
from mlm.util.results import CREATOR

INK, GRID = "#333333", "#dddddd"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of Okabe and Ito (2008), in an order in which neighbours differ in lightness."""
MARKERS = "osD^vPX"
HATCHES = ("", "///", "..", "xx", "\\\\\\", "++", "oo")


def draw(chart: Chart, kind: str) -> bytes:
    """Return a chart as a picture, `svg` or `png`; equal charts give equal bytes."""
    figure = Figure(figsize=(7.2, 4.2), dpi=130, layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_title(chart.title, loc="left", fontsize=10, color=INK)
    if any(isinstance(x, str) for x in chart.series[0].x):
        bars(axes, chart.series)
    else:
        lines(axes, chart.series)
    axes.set_xlabel(chart.x_label, color=INK)
    axes.set_ylabel(chart.y_label, color=INK)
    scale(axes, chart)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.series) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    file = BytesIO()
    # no random ids in an SVG, and text that can be searched
    with rc_context({"svg.hashsalt": "mlm", "svg.fonttype": "none"}):
        made_by = (
            {"Date": None, "Creator": CREATOR, "Title": CREATOR} if kind == "svg" else {"Software": CREATOR}
        )
        figure.savefig(file, format=kind, metadata=made_by)
    return file.getvalue()


def lines(axes: Axes, every: Sequence[Series]) -> None:
    """Draw series as points with lines and error bars."""
    for index, series in enumerate(every):
        axes.errorbar(
            [float(x) for x in series.x],
            list(series.y),
            yerr=spread(series),
            label=label(series),
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)] if len(series.x) <= 40 else None,
            linestyle="--" if series.published else "-",
            markersize=5,
            linewidth=1.5,
            capsize=3,
        )


def bars(axes: Axes, every: Sequence[Series]) -> None:
    """Draw series as groups of bars by name."""
    names = list(dict.fromkeys(str(x) for series in every for x in series.x))
    width = 0.8 / len(every)
    for index, series in enumerate(every):
        axes.bar(
            [names.index(str(x)) + (index - (len(every) - 1) / 2) * width for x in series.x],
            list(series.y),
            width,
            yerr=spread(series),
            label=label(series),
            color="none" if series.published else COLOURS[index % len(COLOURS)],
            edgecolor=COLOURS[index % len(COLOURS)] if series.published else "white",
            linestyle="--" if series.published else "-",
            hatch=HATCHES[index % len(HATCHES)],
            capsize=3,
        )
    axes.set_xticks(range(len(names)), names)


def spread(series: Series) -> list[list[float]] | None:
    """Return the lengths of error bars below and above; None without a spread."""
    if not series.low or not series.high:
        return None
    below = [max(y - low, 0.0) for y, low in zip(series.y, series.low, strict=True)]
    above = [max(high - y, 0.0) for y, high in zip(series.y, series.high, strict=True)]
    return [below, above]


def label(series: Series) -> str:
    """Return a series' name, published ones marked."""
    return f"{series.name} (published)" if series.published else series.name


def scale(axes: Axes, chart: Chart) -> None:
    """Set the axes' scales, with plain numbers on logarithmic ones."""
    if chart.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
    if chart.from_zero:
        axes.set_ylim(bottom=0)
