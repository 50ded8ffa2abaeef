"""Verdicts of `mlm parity` and `mlm verify-resume`: tolerances, a sentence, and a hint.

A layout adds the same numbers in another order. In float64, losses and gradients then agree to about 1e-15,
and a broken mechanism shows ten orders of magnitude above. Narrower formats hide small errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.text import Text

import mlm
from mlm.config.build import to_dict
from mlm.runs.config import PretrainConfig
from mlm.tracking.history import replace_nonfinite
from mlm.util.errors import writing_to
from mlm.util.results import write_result
from mlm.util.terminal import console


@dataclass(frozen=True)
class Tolerance:
    """Largest differences attributed to rounding."""

    loss: float
    """Nats per token."""
    gradient: float
    """Bound of an element in the first step, as a fraction of the largest of its parameter."""
    later: float
    """Bound of an element in later steps, after weights have moved."""
    norm: float
    """Bound of the gradient norm, as a fraction of it."""
    weight: float
    """Bound of a weight in units of the sum of learning rates, about as far as Adam moves it."""


TOLERANCES = {
    # 2^-53 per operation: 1e-15 observed. Adam divides a gradient by its own size plus 1e-8: a difference of
    # 1e-16 in an element near zero moves its weight by 1e-8 of the learning rate, and a few times that later.
    "fp64": Tolerance(loss=1e-10, gradient=1e-10, later=1e-10, norm=1e-10, weight=1e-5),
    # Rounding of 2^-24, 2^-11 and 2^-8 per operation; partial sums over tp are rounded once more. Observed on
    # small models: gradients 6e-7, 3e-3, 2e-2. Adam's first steps are the gradient's sign, so an element near
    # zero may move by a learning rate the other way: later gradients differ ten times as much, and weights by
    # up to two learning rates a step. This bound is weak; later losses check them.
    # Norms are summed in float64 on a CPU, and in float32 and another order by other kernels.
    "fp32": Tolerance(loss=1e-5, gradient=1e-4, later=1e-3, norm=1e-2, weight=2.5),
    "fp16": Tolerance(loss=2e-3, gradient=5e-2, later=3e-1, norm=5e-2, weight=2.5),
    "bf16": Tolerance(loss=1e-2, gradient=1e-1, later=5e-1, norm=5e-2, weight=2.5),
    "tf32": Tolerance(loss=2e-3, gradient=5e-2, later=3e-1, norm=5e-2, weight=2.5),
    # Three bits of mantissa, and a scale per shard where one process has one scale: only gross errors show.
    "fp8": Tolerance(loss=5e-2, gradient=5e-1, later=1.0, norm=2e-1, weight=2.5),
}
FLOOR = 1e-3
"""Least unit of differences, as a fraction of the largest element of its kind (all gradients, all weights):
smaller tensors may be rounding."""


@dataclass(frozen=True)
class Verdict:
    word: Literal["EQUAL", "EQUAL bit for bit", "DIFFERENT", "UNDECIDED"]
    sentence: str
    """One line."""
    hint: str = ""
    """Suspected mechanism, if the differences show it."""

    @property
    def equal(self) -> bool:
        return self.word.startswith("EQUAL")

    @property
    def headline(self) -> str:
        """`EQUAL bit for bit: …`."""
        return f"{self.word}: {self.sentence}"


def write_and_show(
    out: Path, config: PretrainConfig, verdict: Verdict, numbers: Mapping[str, Any], title: str
) -> None:
    """Write the result `out` with all compared numbers (null if not finite); print `title` and the verdict.

    Raises UserError if the disk is full.
    """
    result = {
        "task": out.stem,
        "equal": verdict.equal,
        "verdict": verdict.headline,
        "hint": verdict.hint,
        **numbers,
        "config": to_dict(config),
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
    }
    with writing_to(str(out.parent)):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_result(out, {key: replace_nonfinite(value) for key, value in result.items()})
    screen = console()
    screen.print(title)
    if verdict.equal:  # else the error that ends the command reports it
        screen.print(Text(verdict.headline, style="green"))
    elif verdict.hint:
        screen.print(f"hint: {verdict.hint}")
    screen.print(f"written to {out}")
