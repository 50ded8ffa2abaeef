"""The curves of a run, as a picture: loss, scores, learning rate, throughput and gradient norm."""

from collections.abc import Callable, Sequence
from itertools import cycle
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike

from mlm.tracking.history import read_records
from mlm.tracking.panel import format_count
from mlm.util.files import write_atomic

TRAIN, VALID, LR, RATE, NORM = "#2b6cb0", "#c05621", "#4a7c59", "#6b46c1", "#8a5a00"
INK, PALE = "#333333", "#777777"
PARTS = tuple(
    zip(
        ("#b7791f", "#805ad5", "#2c7a7b", "#97266d", "#4a5568"),
        ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3))),
        ("s", "^", "D", "v", "x"),
        strict=True,
    )
)
"""Colour, dashes and marker of each part: told apart without colour too."""
Series = tuple[list[int], list[float]]  # steps, values
SMOOTH_FROM = 60  # points from which the raw curve is paled and a running mean drawn over it
MARKERS = 25  # about as many markers on a long curve
CLIP_FROM = 20  # points from which a few may be left out of the frame
LOG_FROM = 30.0  # ratio of the largest to the smallest gradient norm that a linear axis would flatten


def plot_losses(metrics_jsonl: Path, png: Path, unit: str = "nats per token") -> None:
    """Draw the curves of a metrics file: training and validation loss in `unit`, and below them small ones.

    Those are scores and accuracies (of a run that has any), learning rate, throughput and gradient norm. The
    lower axis counts steps, the upper one tokens.
    Lines that can't be read and losses that are null (not finite) leave gaps. `png` is replaced atomically.
    Raises OSError if the one can't be read or the other written.
    """
    records = list(read_records(metrics_jsonl))
    steps = [r for r in records if r.get("kind") == "step"]
    validations = [r for r in records if r.get("kind") == "validation"]
    scores = [r for r in records if r.get("kind") == "scores"]
    has_scores = bool(scores) or any(is_share(key) for r in validations for key in r)

    # Figure rather than pyplot: no global state, no display, nothing to close.
    heights = [5, *([2] if has_scores else []), 1.3, 1.3, 1.3]
    figure = Figure(figsize=(8, 1.2 + 0.8 * sum(heights)), dpi=150, layout="constrained", facecolor="white")
    panels: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    top = panels[0]
    train, valid = series(steps, "loss"), series(validations, "loss")
    draw_losses(top, train, valid, unit)
    frame(top, train[1], valid[1], *draw_parts(top, validations))
    if has_scores:
        draw_scores(panels[1], scores, validations)
    for axes, draw in zip(
        panels[-3:], (draw_learning_rate, draw_throughput, draw_gradient_norm), strict=True
    ):
        draw(axes, steps)
    for axes in panels:
        tidy(axes)
    label_steps(panels[-1])
    last = max((r["step"] for r in (*steps, *validations, *scores)), default=0)
    top.set_xlim(0, last * 1.02 or 1)
    add_tokens(top, series(steps, "tokens"))
    figure.align_ylabels(panels)
    write_atomic(png, lambda file: figure.savefig(file, format="png"))


def series(records: Sequence[dict[str, Any]], name: str) -> Series:
    """(steps, values) of one number, NaN where it is null or missing; the last record of a step counts."""
    values = {r["step"]: r.get(name) for r in records}
    steps = sorted(values)
    return steps, [float(v) if isinstance(v := values[s], int | float) else nan for s in steps]


def last_of(values: Sequence[float]) -> float:
    """The last value that is finite, NaN if none is."""
    return next((value for value in reversed(values) if isfinite(value)), nan)


def draw_losses(axes: Axes, train: Series, valid: Series, unit: str) -> None:
    """Both losses; the legend shows their last values."""
    steps, losses = train
    if len(steps) >= SMOOTH_FROM:
        axes.plot(steps, losses, color=TRAIN, alpha=0.25, linewidth=0.8)
        smooth = running_mean(losses, reach=len(losses) // 60)
        label = f"training (running mean), last {last_of(losses):.3f}"
        axes.plot(steps, smooth, color=TRAIN, linewidth=1.6, label=label)
    elif steps:
        label = f"training, last {last_of(losses):.3f}"
        axes.plot(steps, losses, color=TRAIN, linewidth=1.6, marker="o", markersize=3, label=label)
    if valid[0]:
        label = f"validation, last {last_of(valid[1]):.3f}"
        draw_marked(axes, valid, VALID, "--", "o", label=label)
    axes.set_ylabel(f"loss ({unit})")
    if axes.get_lines():
        axes.legend(frameon=False, labelcolor=INK, loc="upper right", handlelength=3.5)
    else:
        axes.text(0.5, 0.5, "nothing logged yet", transform=axes.transAxes, ha="center", color=INK)


def draw_marked(axes: Axes, points: Series, color: str, dashes: Any, marker: str, *, label: str) -> None:
    """A dashed curve with markers, on some of its points if there are many. Gaps are bridged."""
    kept = [(step, value) for step, value in zip(*points, strict=True) if not isnan(value)]
    steps, values = [step for step, _ in kept], [value for _, value in kept]
    every = max(1, len(kept) // MARKERS)
    axes.plot(
        steps, values, color=color, linestyle=dashes, linewidth=1.3, label=label, marker=marker, markersize=4,
        markevery=every, markerfacecolor="white",
    )  # fmt: skip


def is_share(key: str) -> bool:
    """True for a part of a validation that is no loss: an accuracy."""
    return key.startswith("validation/") and key.endswith("_accuracy")


def draw_parts(axes: Axes, validations: Sequence[dict[str, Any]]) -> list[list[float]]:
    """The validation loss of each corpus of a blend, or of each head; returns their values."""
    keys = {key for record in validations for key in record if key.startswith("validation/")}
    names = sorted(key for key in keys if not is_share(key))
    curves = [series(validations, name) for name in names]
    for name, points, (color, dashes, marker) in zip(names, curves, cycle(PARTS), strict=False):
        label = f"{name.partition('/')[2]}, last {last_of(points[1]):.3f}"
        draw_marked(axes, points, color, dashes, marker, label=label)
    if names:
        axes.legend(frameon=False, labelcolor=INK, loc="upper right", handlelength=3.5)
    return [values for _, values in curves]


def draw_scores(axes: Axes, scores: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]]) -> None:
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
    found = [value for _, (_, values) in curves for value in values if isfinite(value)]
    axes.set_ylim(min(0.0, *found) if found else 0, 1)  # a correlation may be negative
    axes.set_ylabel("score (of 1)")
    axes.legend(frameon=False, labelcolor=INK, loc="lower right", handlelength=3.5)


def draw_learning_rate(axes: Axes, steps: Sequence[dict[str, Any]]) -> None:
    """Learning rate over steps, from 0."""
    points = series(steps, "lr")
    axes.plot(*points, color=LR, linewidth=1.4, marker="o" if len(points[0]) == 1 else None, markersize=3)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0"))
    axes.set_ylabel("learning rate")


def draw_throughput(axes: Axes, steps: Sequence[dict[str, Any]]) -> None:
    """Examples per second of a run on a task, tokens per second of any other, from 0."""
    name, label = "tokens_per_s", "tokens/s"
    if any("examples_per_s" in r for r in steps):
        name, label = "examples_per_s", "examples/s"
    points = series(steps, name)
    draw_small(axes, points, RATE)
    frame(axes, points[1], bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.set_ylabel(label)


def draw_gradient_norm(axes: Axes, steps: Sequence[dict[str, Any]]) -> None:
    """Gradient norm before clipping; logarithmic where its range is large."""
    points = series(steps, "grad_norm")
    draw_small(axes, points, NORM)
    positive = [value for value in points[1] if isfinite(value) and value > 0]
    if positive and max(positive) / min(positive) >= LOG_FROM:
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(LogLocator(numticks=4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.set_ylabel("gradient norm")


def draw_small(axes: Axes, points: Series, color: str) -> None:
    """A thin curve, its running mean over it if it is long."""
    steps, values = points
    if len(steps) < SMOOTH_FROM:
        axes.plot(steps, values, color=color, linewidth=1.2, marker="o", markersize=2)
        return
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.7)
    axes.plot(steps, running_mean(values, reach=len(values) // 60), color=color, linewidth=1.3)


def frame(axes: Axes, *curves: Sequence[float], bottom: float | None = None) -> None:
    """Limit the y axis to what curves hold but for rare outliers, such as first steps, and name those."""
    finite = [np.array([v for v in curve if isfinite(v)]) for curve in curves]
    finite = [values for values in finite if len(values)]
    if not finite:
        return
    low, high = min(v.min() for v in finite), max(v.max() for v in finite)
    usual_low, usual_high = min(map(usual_minimum, finite)), max(map(usual_maximum, finite))
    span = usual_high - usual_low if bottom is None else usual_high - bottom
    if bottom is not None:
        low = bottom
    elif low < usual_low - span:
        low = usual_low - span / 2
    if high > usual_high + span > usual_high:
        note = f"▲ up to {format_count(high)}"
        axes.annotate(note, (0.06, 0.98), xycoords="axes fraction", va="top", size=8, color=PALE)
        high = usual_high + span / 4
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    axes.set_ylim(low if bottom is not None else low - margin, high + margin)


def usual_maximum(values: "np.ndarray[Any, Any]") -> float:
    """The largest value, a fiftieth of the values left out if there are many."""
    return float(np.quantile(values, 0.98, method="lower") if len(values) >= CLIP_FROM else values.max())


def usual_minimum(values: "np.ndarray[Any, Any]") -> float:
    """The smallest value, a fiftieth of the values left out if there are many."""
    return -usual_maximum(-values)


def label_steps(axes: Axes) -> None:
    """Whole steps below the lowest panel."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def add_tokens(axes: Axes, tokens: Series) -> None:
    """A second x axis on top that counts tokens, by what was logged: batches may have changed on the way."""
    maps = token_maps(tokens)
    if maps is None:
        return
    top = axes.secondary_xaxis("top", functions=maps)
    top.xaxis.set_major_locator(MaxNLocator(nbins=8))
    top.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    top.set_xlabel("tokens")
    top.tick_params(colors=INK, length=3)
    top.spines["top"].set_visible(False)


Map = Callable[[ArrayLike], ArrayLike]


def token_maps(tokens: Series) -> tuple[Map, Map] | None:
    """Functions from steps to tokens and back, linear between logged steps and beyond them.

    None if fewer tokens than steps were logged, or none at all.
    """
    known = [(0, 0.0)]
    for step, count in zip(*tokens, strict=True):
        if step > known[-1][0] and count > known[-1][1]:
            known.append((step, count))
    if len(known) < 2:
        return None
    xs, ys = (np.array(each, dtype=np.float64) for each in zip(*known, strict=True))

    def extended(at: ArrayLike, xs: Any, ys: Any) -> ArrayLike:
        x = np.asarray(at, dtype=np.float64)
        first, last = (ys[1] - ys[0]) / (xs[1] - xs[0]), (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        inside = np.interp(x, xs, ys)
        beyond = np.where(x > xs[-1], ys[-1] + (x - xs[-1]) * last, inside)
        return np.where(x < xs[0], ys[0] + (x - xs[0]) * first, beyond)

    return lambda x: extended(x, xs, ys), lambda y: extended(y, ys, xs)


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
