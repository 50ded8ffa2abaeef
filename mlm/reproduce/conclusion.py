"""Conclusion of an experiment: a verdict, tables and charts as values that each report format writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

Cell = str | int | float


class Verdict(Enum):
    """Agreement of what was measured with what the paper says."""

    AGREES = "agrees with the paper"
    PARTLY = "agrees with the paper in part"
    CONTRADICTS = "contradicts the paper"
    OPEN = "decides nothing about the paper's claim"
    PLANNED = "planned, not measured"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose first column names its rows."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """Numbers are shown with four significant digits; a text is shown as it is."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of points, or a group of bars, of a chart."""

    name: str
    x: Sequence[float] | Sequence[str]
    """Texts: names of bars."""
    y: Sequence[float]
    low: Sequence[float] = ()
    """Ends of the spread of each point, with `high`; none: no spread is drawn."""
    high: Sequence[float] = ()
    published: bool = False
    """True for the paper's own numbers, which are drawn dashed and named so."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture of series over one pair of axes."""

    name: str
    """Of its file, beside the experiment's report: `perplexity`."""
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    """True: the y axis begins at 0."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture that is SVG already, such as a pipeline's schedule; its text must be escaped."""

    name: str
    title: str
    svg: str


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """A report's content."""

    verdict: Verdict
    seen: str
    """What was measured, in one honest sentence with its numbers and their spread."""
    limits: Sequence[str]
    """What cannot be concluded, a sentence each."""
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    drawings: Sequence[Drawing] = ()
    curves: Sequence[str] = ()
    """Names of steps whose runs are shown with all their curves, at most 20."""
    commands: Sequence[tuple[str, str]] = ()
    """(what it does, command line) pairs, to type on a cluster."""
