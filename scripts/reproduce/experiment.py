"""An experiment of a paper: command lines in stages, and a function that concludes from their results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reproduce.results import Results

SCRIPTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the command line."""

    out: Path
    """Folder of all experiments; a later one reuses the runs of an earlier one."""
    cores: int
    """Cores that steps share."""
    seeds: int = 3
    """Seeds, or rounds of timed runs, from 1 on."""
    corpus: str = "debian"
    """debian, plays, or the folder of a corpus by `mlm data build`."""
    peer: Path | None = None
    """Checkout of nanoGPT."""


@dataclass(frozen=True)
class Step:
    """One command, run in the folder of all experiments: its paths are relative to that."""

    name: str
    """Of its log and record. Experiments that name the same step with the same words share it."""
    words: tuple[str, ...]
    """`("mlm", "pretrain", …)`; `("python", …)` for this interpreter; or another program."""
    result: str
    """File or run folder that it leaves."""
    minutes: float
    """Minutes that it takes about."""
    may_diverge: bool = False
    """True if gradients that overflow are a result, not an error."""


Stages = Sequence[Sequence[Step]]
"""Stages run one after the other; the steps of one stage use one core each and run beside each other."""


class Verdict(Enum):
    """Agreement of what was measured with what the paper says."""

    AGREES = "agrees with the paper"
    PARTLY = "agrees with the paper in part"
    CONTRADICTS = "contradicts the paper"
    NOTHING = "shows nothing about the paper's claim"


Cell = str | int | float


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose first column names its rows."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """Floats are shown with four significant digits."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A picture of lines over one pair of axes, each point with its spread over seeds."""

    name: str
    """Of its file."""
    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]]
    """Name → (x, values of all seeds) pairs."""
    log_x: bool = False


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """A report's content."""

    verdict: Verdict
    seen: str
    """What was measured, in a sentence with its numbers and their spread."""
    limits: Sequence[str]
    """What cannot be concluded, a sentence each."""
    tables: Sequence[Table] = ()
    curves: Curves | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table, as it is measured here."""

    name: str
    title: str
    source: str
    """`Megatron-LM, arXiv:1909.08053, figure 6`."""
    claim: str
    """What the paper says, in a sentence. Its numbers are those of published tables and abstracts that were
    read (scripts/results/published); none is remembered."""
    minutes: float
    """Minutes on two cores."""
    stages: Callable[[Settings], Stages]
    conclude: Callable[["Results"], Conclusion]
    """Read the results of all steps and say what they show."""
