"""The loss curve of a run, as a picture."""

from collections.abc import Sequence
from itertools import cycle
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mlm.files.atomic import write_atomic
from mlm.report.history import read_records

PARTS = ("#b7791f", "#805ad5", "#2c7a7b", "#97266d", "#4a5568")
TRAIN, VALID, LR, INK = "#2b6cb0", "#c05621", "#4a7c59", "#333333"
Series = tuple[list[int], list[float]]  # steps, values
SMOOTH_FROM = 60  # points from which the raw curve is paled and a running mean drawn over it


def plot_losses(metrics_jsonl: Path, png: Path, unit: str = "nats per token") -> None:
    """Draw training and validation loss, in `unit`, and the learning rate below, from a metrics file.

    Of a run on a task also the metric that chooses its best checkpoint, on a separate axis.
    Lines that can't be read and losses that are null (not finite) leave gaps. `png` is replaced atomically.
    Raises OSError if the one can't be read or the other written.
    """
    records = list(read_records(metrics_jsonl))
    steps = [r for r in records if r.get("kind") == "step"]
    validations = [r for r in records if r.get("kind") == "validation"]

    # Figure rather than pyplot: no global state, no display, nothing to close.
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    draw_losses(top, series(steps, "loss"), series(validations, "loss"), unit)
    if scores := [r for r in records if r.get("kind") == "scores"]:
        draw_scores(top.twinx(), scores)
    draw_parts(top, validations)
    draw_learning_rate(bottom, series(steps, "lr"))
    for axes in (top, bottom):
        tidy(axes)
    top.set_xlim(0, max((r["step"] for r in (*steps, *validations)), default=0) * 1.02 or 1)
    figure.align_ylabels([top, bottom])
    write_atomic(png, lambda file: figure.savefig(file, format="png"))


def series(records: Sequence[dict[str, Any]], name: str) -> Series:
    """(steps, values) of one number, NaN where it is null or missing; the last record of a step counts."""
    values = {r["step"]: r.get(name) for r in records}
    steps = sorted(values)
    return steps, [v if isinstance(v := values[s], int | float) else float("nan") for s in steps]


def draw_scores(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """The first metric of each split that was scored, from 0 to 1."""
    names = {r["split"]: next(k for k in r if k not in ("kind", "time", "step", "split")) for r in records}
    colors = cycle((VALID, *PARTS))
    for split, metric in names.items():
        mine = [r for r in records if r["split"] == split]
        steps, values = series(mine, metric)
        label = f"{split} {metric}, last {values[-1]:.3f}"
        axes.plot(steps, values, color=next(colors), linewidth=1.4, marker="o", markersize=4, label=label)
    axes.set_ylim(0, 1)
    axes.set_ylabel("score")
    axes.legend(frameon=False, labelcolor=INK, loc="lower right")


def draw_losses(axes: Axes, train: Series, valid: Series, unit: str) -> None:
    """Both losses; the legend shows their last values."""
    steps, losses = train
    if len(steps) >= SMOOTH_FROM:
        axes.plot(steps, losses, color=TRAIN, alpha=0.25, linewidth=0.8)
        smooth = running_mean(losses, reach=len(losses) // 60)
        label = f"training (running mean), last {losses[-1]:.3f}"
        axes.plot(steps, smooth, color=TRAIN, linewidth=1.6, label=label)
    elif steps:
        label = f"training, last {losses[-1]:.3f}"
        axes.plot(steps, losses, color=TRAIN, linewidth=1.6, marker="o", markersize=3, label=label)
    if valid[0]:
        marker = "o" if len(valid[0]) <= SMOOTH_FROM else None
        label = f"validation, last {valid[1][-1]:.3f}"
        axes.plot(*valid, color=VALID, linewidth=1.4, marker=marker, markersize=4, label=label)
    axes.set_ylabel(f"loss ({unit})")
    if axes.get_lines():
        axes.legend(frameon=False, labelcolor=INK)
    else:
        axes.text(0.5, 0.5, "nothing logged yet", transform=axes.transAxes, ha="center", color=INK)


def draw_parts(axes: Axes, validations: Sequence[dict[str, Any]]) -> None:
    """The validation loss of each corpus of a blend."""
    names = sorted({key for record in validations for key in record if key.startswith("validation/")})
    for name, colour in zip(names, cycle(PARTS), strict=False):
        steps, losses = series(validations, name)
        last = next((loss for loss in reversed(losses) if not isnan(loss)), losses[-1])
        label = f"{name.partition('/')[2]}, last {last:.3f}"
        axes.plot(steps, losses, color=colour, linewidth=1.0, linestyle="--", label=label)
    if names:
        axes.legend(frameon=False, labelcolor=INK)


def draw_learning_rate(axes: Axes, points: Series) -> None:
    """Learning rate over steps, from 0."""
    axes.plot(*points, color=LR, linewidth=1.4, marker="o" if len(points[0]) == 1 else None, markersize=3)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0"))
    axes.set_ylabel("learning rate")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def tidy(axes: Axes) -> None:
    """Only the lines a reader needs."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=3)


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and its `reach` neighbours on both sides, NaN values left out.

    Towards the ends fewer neighbours count, still as many on each side: a slope there isn't flattened.
    """
    array = np.asarray(values, dtype=np.float64)
    index = np.arange(len(array))
    reaches = np.minimum(reach, np.minimum(index, index[::-1]))
    first, end = index - reaches, index + reaches + 1
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(array, nan=0.0))])
    counts = np.concatenate([[0.0], np.cumsum(~np.isnan(array))])
    total, count = sums[end] - sums[first], counts[end] - counts[first]
    means: list[float] = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0).tolist()
    return means
