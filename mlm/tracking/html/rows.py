"""Numbers of a run's records by column, and curves of them thinned for a page.

Of each bucket of neighbouring points the first, the last, the lowest and the highest stay, so that no spike
is lost. The mean of each bucket goes with them, for smoothed curves.
"""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
MOST_COLUMNS = 64
"""Names of numbers in one type of record; a damaged file may have any number."""
KEPT = 5
"""Points of a bucket that stay: first, last, lowest, highest, and one that is not finite."""
FIGURES = 7
"""Significant digits of a value on a page."""
LARGEST = float(1 << 53)


class Rows:
    """Numbers of one type of record, in the order of the file."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {"step": array("d")}

    def __len__(self) -> int:
        return len(self.columns["step"])

    def add(self, numbers: Mapping[str, float]) -> None:
        """Append a row; a column that it lacks gets NaN."""
        for name in numbers:
            if name not in self.columns and len(self.columns) < MOST_COLUMNS:
                self.columns[name] = array("d", [math.nan]) * len(self)
        for name, column in self.columns.items():
            column.append(numbers.get(name, math.nan))

    def return_to(self, step: float) -> None:
        """Drop the rows after `step`: they are trained again."""
        steps = np.array(self.columns["step"])
        if np.any(steps > step):
            stay = steps <= step
            self.columns = {name: array("d", np.array(c)[stay]) for name, c in self.columns.items()}

    def table(self) -> dict[str, Column]:
        """Columns with ascending steps; of rows with one step the later one."""
        found = {name: np.array(column) for name, column in self.columns.items()}
        steps = found["step"]
        if len(steps) > 1 and np.any(np.diff(steps) <= 0):
            order = np.argsort(steps, kind="stable")
            stay = order[np.append(np.diff(steps[order]) > 0, True)]
            found = {name: column[stay] for name, column in found.items()}
        for name in ("tokens", "time"):  # an axis never goes back, whatever the clock did
            if name in found:
                found[name] = np.fmax.accumulate(found[name])
        return found


def number(value: object) -> float:
    """A value of JSON as a number; NaN for what is none, or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


@dataclass(frozen=True)
class Curve:
    """Points of one curve on a page."""

    x: dict[str, Column]
    """Values on each axis by its name."""
    y: Column
    bucket: int
    """Points of the run that the thinned curve has four of; 1 if none is left out."""
    mean_x: dict[str, Column]
    mean_y: Column
    """Mean of each bucket; empty where nothing is left out."""

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        found: dict[str, Any] = {name: listed(column) for name, column in self.x.items()}
        found["y"] = listed(self.y)
        if self.bucket > 1:
            mean = {name: listed(column) for name, column in self.mean_x.items()}
            found |= {"bucket": self.bucket, "mean": {**mean, "y": listed(self.mean_y)}}
        return found


def thin(x: Mapping[str, Column], y: Column, most: int) -> Curve:
    """Thin a curve to about `most` points."""
    if len(y) <= most:
        return Curve(dict(x), y, 1, {}, np.empty(0))
    edges = np.linspace(0, len(y), max(most // KEPT, 1) + 1).astype(int)
    stay, middles, means = set[int](), list[int](), list[float]()
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = y[start:end]
        sound = np.isfinite(part)
        stay |= {start, end - 1}
        middles.append((start + end - 1) // 2)
        means.append(float(part[sound].mean()) if sound.any() else math.nan)
        if sound.any():
            stay |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
        if not sound.all():
            stay.add(start + int(np.argmin(sound)))
    chosen, middle = np.array(sorted(stay)), np.array(middles)
    return Curve(
        {name: column[chosen] for name, column in x.items()},
        y[chosen],
        bucket=round(len(y) / (len(edges) - 1)),
        mean_x={name: column[middle] for name, column in x.items()},
        mean_y=np.array(means),
    )


def listed(column: Column) -> list[float | int | None]:
    """Numbers for JSON: whole ones as such, others to some digits, null for NaN."""
    return [_short(value) for value in column.tolist()]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value.is_integer() and abs(value) < LARGEST:
        return int(value)
    return float(f"{value:.{FIGURES}g}")
