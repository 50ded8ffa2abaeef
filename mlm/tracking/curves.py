"""The curves of a run, as a picture: loss, scores, learning rate, throughput and gradient norm."""

from collections.abc import Callable, Sequence
from itertools import cycle
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mlm.tracking.history import read_records
from mlm.tracking.panel import format_count
from mlm.util.files import write_atomic

TRAIN, VALID, LR, RATE, NORM = "#2b6cb0", "#c05621", "#4a7c59", "#6b46c1", "#8a5a00"
INK = "#333333"
PARTS = tuple(
    zip(
        ("#b7791f", "#805ad5", "#2c7a7b", "#97266d", "#4a5568"),
        ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3))),
        ("s", "^", "D", "v", "x"),
        strict=True,
    )
)
"""Colour, dashes and marker of each part: told apart without colour too."""
Records = Sequence[dict[str, Any]]
Series = tuple[list[int], list[float]]  # steps, values
SMOOTH_FROM = 60  # points from which the raw curve is paled and a running mean drawn over it
MARKERS = 25  # about as many markers on a long curve
CLIP_FROM = 20  # points from which a few may be left out of the frame
LOG_FROM = 30.0  # ratio of the largest to the smallest gradient norm that a linear axis would flatten


def plot_losses(metrics_jsonl: Path, png: Path, unit: str = "nats per token") -> None:
    """Draw the curves of a metrics file: training and validation loss in `unit`, and below them small ones.

    Those are scores and accuracies (of a run that has any), learning rate, throughput and gradient norm.
    Lines that can't be read and losses that are null (not finite) leave gaps. `png` is replaced atomically.
    Raises OSError if the one can't be read or the other written.
    """
    records = list(read_records(metrics_jsonl))
    steps, validations, scores = (
        [record for record in records if record["kind"] == kind] for kind in ("step", "validation", "scores")
    )
    has_scores = bool(scores) or any(is_share(key) for record in validations for key in record)

    # Figure rather than pyplot: no global state, no display, nothing to close.
    heights = [5, *([2] if has_scores else []), 1.3, 1.3, 1.3]
    figure = Figure(figsize=(8, 1.2 + 0.8 * sum(heights)), dpi=150, layout="constrained", facecolor="white")
    panels: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    draw_losses(panels[0], steps, validations, unit)
    if has_scores:
        draw_scores(panels[1], scores, validations)
    rate = "examples" if any("examples_per_s" in record for record in steps) else "tokens"
    draw_small(panels[-3], series(steps, "lr"), LR, "learning rate", lambda value: f"{value:.1e}")
    draw_small(panels[-2], series(steps, f"{rate}_per_s"), RATE, f"{rate}/s", format_count)
    draw_small(panels[-1], series(steps, "grad_norm"), NORM, "gradient norm", lambda value: f"{value:g}")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e5e5", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, length=3)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    last = max((record["step"] for record in (*steps, *validations, *scores)), default=0)
    panels[0].set_xlim(0, last * 1.02 or 1)
    figure.align_ylabels(panels)
    write_atomic(png, lambda file: figure.savefig(file, format="png"))


def series(records: Records, name: str) -> Series:
    """(steps, values) of one number, NaN where it is null or missing; the last record of a step counts."""
    values = {r["step"]: r.get(name) for r in records}
    steps = sorted(values)
    return steps, [float(v) if isinstance(v := values[s], int | float) else nan for s in steps]


def last_of(values: Sequence[float]) -> float:
    """The last value that is finite, NaN if none is."""
    return next((value for value in reversed(values) if isfinite(value)), nan)


def is_share(key: str) -> bool:
    """True for a part of a validation that is no loss: an accuracy."""
    return key.startswith("validation/") and key.endswith("_accuracy")


def draw_losses(axes: Axes, steps: Records, validations: Records, unit: str) -> None:
    """Training and validation loss, and that of each corpus of a blend or of each head; with last values."""
    train, valid = series(steps, "loss"), series(validations, "loss")
    if train[0]:
        draw_smoothed(axes, train, TRAIN, label=f"training, last {last_of(train[1]):.3f}")
    if valid[0]:
        draw_marked(axes, valid, VALID, "--", "o", label=f"validation, last {last_of(valid[1]):.3f}")
    names = {key for record in validations for key in record if key.startswith("validation/")}
    parts = {name: series(validations, name) for name in sorted(names) if not is_share(name)}
    for (name, points), style in zip(parts.items(), cycle(PARTS), strict=False):
        label = f"{name.partition('/')[2]}, last {last_of(points[1]):.3f}"
        draw_marked(axes, points, *style, label=label)
    frame(axes, train[1], valid[1], *(values for _, values in parts.values()))
    axes.set_ylabel(f"loss ({unit})")
    if axes.get_lines():
        axes.legend(frameon=False, labelcolor=INK, loc="upper right", handlelength=3.5)
    else:
        axes.text(0.5, 0.5, "nothing logged yet", transform=axes.transAxes, ha="center", color=INK)


def draw_scores(axes: Axes, scores: Records, validations: Records) -> None:
    """The first metric of each split that was scored, and accuracies of validations, from 0 to 1."""
    names = {r["split"]: next(k for k in r if k not in ("kind", "time", "step", "split")) for r in scores}
    curves = [
        (f"{split} {metric}", series([r for r in scores if r["split"] == split], metric))
        for split, metric in names.items()
    ]
    accuracies = sorted({key for r in validations for key in r if is_share(key)})
    curves += [(key.replace("/", " ").replace("_", " "), series(validations, key)) for key in accuracies]
    for (name, points), style in zip(curves, cycle(((VALID, "--", "o"), *PARTS)), strict=False):
        draw_marked(axes, points, *style, label=f"{name}, last {last_of(points[1]):.3f}")
    finite = [value for _, (_, values) in curves for value in values if isfinite(value)]
    axes.set_ylim(min([0.0, *finite]), 1)  # a correlation may be negative
    axes.set_ylabel("score (of 1)")
    axes.legend(frameon=False, labelcolor=INK, loc="lower right", handlelength=3.5)


def draw_small(axes: Axes, points: Series, color: str, label: str, form: Callable[[float], str]) -> None:
    """A curve from 0; logarithmic where the range of gradient norms is large."""
    draw_smoothed(axes, points, color)
    axes.set_ylabel(label)
    positive = [value for value in points[1] if isfinite(value) and value > 0]
    if label == "gradient norm" and positive and max(positive) / min(positive) >= LOG_FROM:
        axes.set_yscale("log", nonpositive="mask")
        return
    frame(axes, points[1])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value) if value else "0"))


def draw_smoothed(axes: Axes, points: Series, color: str, *, label: str | None = None) -> None:
    """A curve; a long one pale, with its running mean over it."""
    steps, values = points
    if len(steps) < SMOOTH_FROM:
        axes.plot(steps, values, color=color, linewidth=1.4, marker="o", markersize=2.5, label=label)
        return
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.7)
    axes.plot(steps, running_mean(values, len(values) // 60), color=color, linewidth=1.5, label=label)


def draw_marked(axes: Axes, points: Series, color: str, dashes: Any, marker: str, *, label: str) -> None:
    """A dashed curve with markers, on some of its points if there are many. Gaps are bridged."""
    kept = [(step, value) for step, value in zip(*points, strict=True) if not isnan(value)]
    steps, values = [step for step, _ in kept], [value for _, value in kept]
    every = max(1, len(kept) // MARKERS)
    axes.plot(
        steps, values, color=color, linestyle=dashes, linewidth=1.3, label=label, marker=marker, markersize=4,
        markevery=every, markerfacecolor="white",
    )  # fmt: skip


def frame(axes: Axes, *curves: Sequence[float]) -> None:
    """Leave the highest fiftieth of long curves out of the frame, if it would flatten the rest."""
    finite = [np.array([v for v in curve if isfinite(v)]) for curve in curves]
    finite = [values for values in finite if len(values)]
    if not finite:
        return
    low, high = min(v.min() for v in finite), max(v.max() for v in finite)
    usual = max(np.quantile(v, 0.98) if len(v) >= CLIP_FROM else v.max() for v in finite)
    high = usual if high > 2 * usual - low else high
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    axes.set_ylim(low - margin, high + margin)


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
