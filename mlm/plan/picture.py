"""A plan as a picture file: the timeline of arXiv:2104.04473, figures 3 and 4."""

from typing import BinaryIO

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mlm.parallel.pipeline.actions import Action, Plan, TimedAction
from mlm.plan.drawing import fill, ink, op_names
from mlm.util.results import CREATOR

IDLE, INK = "#e8e8e8", "#333333"
CELL_INCHES = 0.24  # width of the shortest computation
ROW_INCHES = 0.3
LEGEND_INCHES = 1.5  # width of one entry
LARGEST_INCHES = 60  # 9,000 pixels: viewers reject much larger ones
MOST_LABELS = 20_000  # matplotlib takes about a millisecond for each
FONT_POINTS, SMALLEST_POINTS = 8, 3.5


def draw(plan: Plan, title: str, file: BinaryIO, kind: str) -> None:
    """Write the picture (svg or png) to a file; equal plans give equal bytes. Raises OSError."""
    width = picture_inches(plan)
    height = min(ROW_INCHES * len(plan.timeline) + 1.3, LARGEST_INCHES)
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    draw_cells(axes, plan)
    draw_labels(axes, plan, points_per_time=72 * (width - 1) / plan.makespan)
    draw_frame(axes, plan)
    patches = legend(plan)
    columns = min(len(patches), max(int(width / LEGEND_INCHES), 1))
    figure.legend(
        handles=patches, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, labelcolor=INK
    )
    # no random ids in an SVG, and text that can be searched
    with rc_context({"svg.hashsalt": "mlm", "svg.fonttype": "none"}):
        made_by = {"Date": None, "Creator": CREATOR} if kind == "svg" else {"Software": CREATOR}
        figure.savefig(file, format=kind, metadata=made_by)


def picture_inches(plan: Plan) -> float:
    """Width at which the shortest computation has room for its number, within what a viewer can open."""
    shortest = min(span.end - span.start for spans in plan.timeline for span in spans)
    return min(max(plan.makespan / shortest * CELL_INCHES + 1, 7.0), LARGEST_INCHES)


def draw_cells(axes: Axes, plan: Plan) -> None:
    """A cell per computation, on a grey band per rank that shows where it idles."""
    bands = [corners(rank, 0, plan.makespan) for rank in range(len(plan.timeline))]
    axes.add_collection(PolyCollection(bands, facecolors=IDLE, edgecolors="none"))
    cells = [(rank, span) for rank, spans in enumerate(plan.timeline) for span in spans]
    num_chunks = plan.num_stages // len(plan.timeline)
    axes.add_collection(
        PolyCollection(
            [corners(rank, span.start, span.end) for rank, span in cells],
            facecolors=[fill(span.action, num_chunks) for _, span in cells],
            edgecolors="white",
            linewidths=0.5,
        )
    )


def corners(rank: int, start: float, end: float) -> list[tuple[float, float]]:
    """A rank's strip from `start` to `end`; ranks are 1 apart."""
    return [(start, rank - 0.45), (end, rank - 0.45), (end, rank + 0.45), (start, rank + 0.45)]


def draw_labels(axes: Axes, plan: Plan, *, points_per_time: float) -> None:
    """The micro-batch's number in every cell that has room for it."""
    if sum(map(len, plan.timeline)) > MOST_LABELS:
        return
    num_chunks = plan.num_stages // len(plan.timeline)
    for rank, spans in enumerate(plan.timeline):
        for span in spans:
            size = font_points(span, points_per_time)
            if size >= SMALLEST_POINTS:
                axes.text(
                    (span.start + span.end) / 2,
                    rank,
                    str(span.action.micro_batch),
                    fontsize=size,
                    color=ink(fill(span.action, num_chunks)),
                    ha="center",
                    va="center_baseline",
                )


def font_points(span: TimedAction, points_per_time: float) -> float:
    """Size at which a cell's number fits: a digit is about 0.64 as wide as high."""
    digits = len(str(span.action.micro_batch))
    return min(FONT_POINTS, (span.end - span.start) * points_per_time / (0.64 * digits + 0.3))


def draw_frame(axes: Axes, plan: Plan) -> None:
    """Ranks downwards, time to the right."""
    axes.set_xlim(0, plan.makespan)
    axes.set_ylim(len(plan.timeline) - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(plan.timeline) <= 32:
        axes.set_yticks(range(len(plan.timeline)))
    axes.set_ylabel("rank", color=INK)
    axes.set_xlabel("time", color=INK)
    axes.tick_params(colors=INK, length=3)
    axes.spines[:].set_visible(False)


def legend(plan: Plan) -> list[Patch]:
    """A patch for each op and chunk, and one for idle time."""
    num_chunks = plan.num_stages // len(plan.timeline)
    patches = []
    for op, name in op_names(plan.timeline).items():
        for chunk in range(num_chunks):
            where = f", chunk {chunk}" if num_chunks > 1 else ""
            patches.append(Patch(color=fill(Action(op, chunk, 0), num_chunks), label=name + where))
    return [*patches, Patch(color=IDLE, label="idle")]
