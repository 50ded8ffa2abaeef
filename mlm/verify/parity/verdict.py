"""The verdict on a layout against one process: tolerances, a sentence, and what to suspect.

A layout adds the same numbers in another order. So in float64 losses and gradients agree to rounding, some
1e-15, and a mechanism that is wrong shows ten orders of magnitude above that. In narrower formats the same
errors show less clearly: float64 proves, the others only reassure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlm.verify.parity.compare import Difference, Report, StepReport


@dataclass(frozen=True)
class Tolerance:
    """Largest differences attributed to rounding."""

    loss: float
    """Nats per token."""
    gradient: float
    """Bound of an element at the first step, as a fraction of the largest of its parameter."""
    later: float
    """The same after weights have moved."""
    norm: float
    """Bound of the gradient norm, as a fraction of it."""
    weight: float
    """Bound of a weight, in units of the learning rates summed over steps: about how far Adam moves it."""


TOLERANCES = {
    # 2^-53 per operation: 1e-15 observed. Adam divides a gradient by its own size plus 1e-8: a difference of
    # 1e-16 in an element near zero moves its weight by 1e-8 of the learning rate, and a few times that later.
    "fp64": Tolerance(loss=1e-10, gradient=1e-10, later=1e-10, norm=1e-10, weight=1e-5),
    # Rounding of 2^-24, 2^-11 and 2^-8 per operation; partial sums over tp are rounded once more. Observed on
    # small models: gradients 6e-7, 3e-3, 2e-2. Adam's first steps are the gradient's sign, so that an element
    # near zero may go a whole learning rate the other way: later gradients differ ten times as much, and no
    # weight by more than two learning rates a step. Their bound is weak; later losses judge them.
    # A norm is added up in float64 on a CPU, in float32 by other kernels, whose order is their own.
    "fp32": Tolerance(loss=1e-5, gradient=1e-4, later=1e-3, norm=1e-2, weight=2.5),
    "fp16": Tolerance(loss=2e-3, gradient=5e-2, later=3e-1, norm=5e-2, weight=2.5),
    "bf16": Tolerance(loss=1e-2, gradient=1e-1, later=5e-1, norm=5e-2, weight=2.5),
    "tf32": Tolerance(loss=2e-3, gradient=5e-2, later=3e-1, norm=5e-2, weight=2.5),
    # Three bits of mantissa, and a scale per shard where one process has one scale: only gross errors show.
    "fp8": Tolerance(loss=5e-2, gradient=5e-1, later=1.0, norm=2e-1, weight=2.5),
}
FLOOR = 1e-3
"""A parameter whose largest gradient is below this fraction of the model's largest is measured against that:
what it holds may be rounding itself."""
ALIKE = 1e-6
"""Cosines this close to 1, and factors this close to each other, count as the same in a diagnosis."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a comparison."""

    word: Literal["EQUAL", "DIFFERENT", "UNDECIDED"]
    sentence: str
    """One line."""
    hint: str = ""
    """The mechanism to suspect, if the pattern of differences shows it."""

    @property
    def equal(self) -> bool:
        """True if the layout trains as one process does."""
        return self.word == "EQUAL"


def judge(report: Report, precision: str, optimizer: str = "adamw") -> Verdict:
    """The verdict on a comparison in the format `precision`, of runs with this optimizer.kind."""
    tolerance, moved = TOLERANCES[precision], 0.0
    if all(skipped(step) for step in report.steps):
        return Verdict(
            "UNDECIDED", "nothing could be compared: on both sides every step's gradients overflow"
        )
    for step in report.steps:
        if (verdict := _of_step(step, tolerance)) is not None:
            return verdict
        moved += step.lr
        worst = max(step.weights, key=lambda weight: weight.difference, default=None)
        if worst is not None and not worst.difference <= tolerance.weight * moved:
            return Verdict(
                "DIFFERENT",
                f"the weights of {worst.name} differ by {worst.difference:.2g} after step {step.step}, "
                f"{of_moved(worst.difference, moved):.2g} times what the learning rate moved them; gradients "
                "are equal",
                "suspect the optimizer: its state, weight decay, or which parameters it holds"
                if optimizer == "adamw"
                else f"suspect optimizer.kind={optimizer}: an update of an element that reads other elements",
            )
    if report.torn:
        return Verdict(
            "DIFFERENT",
            f"the copies of {report.torn[0]} on several ranks are no longer equal bit for bit"
            + (f", nor those of {len(report.torn) - 1} more" if len(report.torn) > 1 else ""),
            "suspect a reduction that reaches some copies only: they will drift apart",
        )
    return Verdict("EQUAL", _agreement(report))


def skipped(step: StepReport) -> bool:
    """True if both sides skipped the step because its gradients overflow float16."""
    return not (math.isfinite(step.grad_norm.one_process) or math.isfinite(step.grad_norm.layout))


def relative(gradients: Sequence[Difference]) -> list[float]:
    """Differences as fractions of the largest element of the same parameter, or of FLOOR of the largest."""
    floor = FLOOR * max((g.largest for g in gradients), default=0.0)
    return [g.difference / max(g.largest, floor) if g.largest or floor else g.difference for g in gradients]


def of_moved(difference: float, moved: float) -> float:
    """A difference of weights in units of what the learning rates move them: their sum, 0 if all are."""
    return difference / moved if moved else math.inf if difference else 0.0


def _of_step(step: StepReport, tolerance: Tolerance) -> Verdict | None:
    """The verdict on a step that differs; None if it agrees."""
    if not step.loss.difference <= tolerance.loss:
        return Verdict(
            "DIFFERENT",
            f"the first difference is in the loss of step {step.step}: {step.loss.one_process:.10g} on one "
            f"process, {step.loss.layout:.10g} on the layout",
            _hint_of_loss(step, tolerance),
        )
    if skipped(step):
        return None
    wrong = _wrong(step, tolerance)
    if wrong:
        # backward begins at the end of the model: the last wrong one is the first it computed
        first = wrong[-1]
        off = dict(zip(step.gradients, relative(step.gradients), strict=True))[first]
        return Verdict(
            "DIFFERENT",
            f"the first difference is in the gradient of {first.name} at step {step.step}: {off:.2g} of its "
            f"largest element; {len(wrong)} of {len(step.gradients)} parameters differ",
            _hint_of_gradients(wrong, step.gradients),
        )
    norm = step.grad_norm
    if not norm.difference <= tolerance.norm * abs(norm.one_process):
        return Verdict(
            "DIFFERENT",
            f"the first difference is in the gradient norm of step {step.step}: {norm.one_process:.10g} on "
            f"one process, {norm.layout:.10g} on the layout; the gradients are equal",
            "suspect what counts in the norm: each part once over tp, pp and dp",
        )
    return None


def _of_gradients(step: StepReport, tolerance: Tolerance) -> float:
    return tolerance.gradient if step.step == 1 else tolerance.later


def _wrong(step: StepReport, tolerance: Tolerance) -> list[Difference]:
    """Gradients beyond the tolerance, in the order of the model."""
    off = zip(step.gradients, relative(step.gradients), strict=True)
    return [gradient for gradient, by in off if not by <= _of_gradients(step, tolerance)]


def _hint_of_loss(step: StepReport, tolerance: Tolerance) -> str:
    if step.step > 1:
        return "gradients and weights of the steps before are equal: suspect the samples of this step"
    factor = common_factor(step.gradients)
    if factor is not None and _wrong(step, tolerance):
        return (
            f"all gradients are {factor:.6g} times those of one process: suspect what the loss is divided by"
        )
    return (
        "the forward pass differs: suspect how weights are split (the order of the qkv rows), a sum over tp, "
        "positions (learned or rotary positions, of tp and cp ranks too), dropout masks, or which samples "
        "each replica reads"
    )


def _hint_of_gradients(wrong: Sequence[Difference], gradients: Sequence[Difference]) -> str:
    factor = common_factor(gradients)
    if factor is not None and len(wrong) == len(gradients):
        return (
            f"all gradients are {factor:.6g} times those of one process: suspect what the loss is divided "
            "by, or a sum over dp or cp that is missing or made twice"
        )
    if [gradient.name for gradient in wrong] == [gradients[0].name]:
        return (
            "only the table that embedding and head share is wrong: suspect the sum over the first and the "
            "last stage"
        )
    if all(gradient.replicated for gradient in wrong):
        return (
            "only parameters that every tp rank holds, or several share, are wrong: suspect the sum of their "
            "gradients over tp, which sequence_parallel=true, norms of heads and shared key-value heads "
            "need, or a bias that each rank adds"
        )
    last = gradients.index(wrong[-1])
    if any(gradient not in wrong for gradient in gradients[:last]):
        return (
            "gradients before and after it are right, so backward through the layers is right: suspect how "
            "its own gradient is computed, kept or reduced"
        )
    if last == len(gradients) - 1:
        return (
            "everything is wrong: suspect where the backward pass begins, the loss and the head, or a sum "
            "over dp or cp that is missing"
        )
    return (
        f"{gradients[last + 1].name} is right and all before it is wrong: suspect what is done to the "
        "gradient of that layer's input (f, its sum over tp; its way to the stage before), or to that of "
        "keys and values (its sum over cp)"
    )


def common_factor(gradients: Sequence[Difference]) -> float | None:
    """The number by which all gradients are those of one process multiplied; None where there is none."""
    factors = [gradient.factor for gradient in gradients]
    if not all(math.isfinite(factor) for factor in factors) or not factors:
        return None
    mean = sum(factors) / len(factors)
    same = all(abs(factor - mean) <= ALIKE * abs(mean) for factor in factors)
    return mean if same and all(gradient.cosine >= 1 - ALIKE for gradient in gradients) else None


def _agreement(report: Report) -> str:
    """The agreement in words."""
    counted = [step for step in report.steps if not skipped(step)]
    losses = max(step.loss.difference for step in report.steps)
    gradients = max(by for step in counted for by in relative(step.gradients))
    weights = max(weight.difference for weight in report.weights)
    moved = sum(step.lr for step in report.steps)
    copies = f"; {report.replicated} parameters held in copies, all bit-equal" if report.replicated else ""
    moves = f"{of_moved(weights, moved):.1e} of what the learning rate moves them"
    rounding = (
        f"; {report.by_gradient} elements compared by gradient alone, which is rounding"
        if report.by_gradient
        else ""
    )
    return (
        f"losses to {losses:.1e}, gradients to {gradients:.1e} of the largest of each, weights to "
        f"{moves if moved else f'{weights:.1e}, as every learning rate is 0'}{rounding}{copies}"
    )
