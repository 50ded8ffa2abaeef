"""Whether a layout equals one process: tolerances, the verdict in words, and what to suspect.

A layout adds the same numbers in another order. So in float64 losses and gradients agree to rounding, some
1e-15, and a mechanism that is wrong shows ten orders of magnitude above that. In narrower formats the same
faults show less clearly: float64 proves, the others only reassure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlm.train.parity import Difference, Report, StepReport


@dataclass(frozen=True)
class Tolerance:
    """What may differ by rounding alone."""

    loss: float
    """Nats per token."""
    gradient: float
    """Of an element, as a fraction of the largest of its parameter; also of the norm, as a fraction of it."""
    weight: float
    """Of an element, in units of the learning rates summed over the steps: about how far Adam moves it."""


TOLERANCES = {
    # 2^-53 per operation, 1e-15 observed. Adam divides a gradient by its own size plus 1e-8: a difference of
    # 1e-16 in an element near zero moves its weight by 1e-8 of the learning rate, and a few times that later.
    "fp64": Tolerance(loss=1e-10, gradient=1e-10, weight=1e-5),
    # Rounding of 2^-24, 2^-11 and 2^-8 per operation, and partial sums over tp rounded once more. Adam's
    # first steps are the sign of the gradient, so an element near zero may move a whole learning rate the
    # other way: no weight is further off than two, and only the losses and gradients of later steps judge.
    "fp32": Tolerance(loss=1e-5, gradient=1e-3, weight=2.5),
    "fp16": Tolerance(loss=2e-3, gradient=5e-2, weight=2.5),
    "bf16": Tolerance(loss=1e-2, gradient=2e-1, weight=2.5),
}
FLOOR = 1e-3
"""A parameter whose largest gradient is below this fraction of the model's largest is measured against that:
what it holds may be rounding itself."""
ALIKE = 1e-6
"""Cosines this close to 1, and factors this close to each other, count as the same in a diagnosis."""


@dataclass(frozen=True)
class Verdict:
    """What the numbers say."""

    equal: bool
    sentence: str
    """One line."""
    hint: str = ""
    """Which mechanism to suspect, where the pattern of differences says it."""


def judge(report: Report, precision: str) -> Verdict:
    """The verdict on a comparison in the format `precision` (fp64, fp32, bf16, fp16)."""
    tolerance = TOLERANCES[precision]
    if all(skipped(step) for step in report.steps):
        return Verdict(False, "nothing was compared: the gradients of every step overflow, on both sides")
    for step in report.steps:
        if (verdict := _of_step(step, tolerance)) is not None:
            return verdict
    moved = sum(step.lr for step in report.steps)
    worst = max(report.weights, key=lambda weight: weight.difference)
    if not worst.difference <= tolerance.weight * moved:
        return Verdict(
            False,
            f"the weights of {worst.name} differ by {worst.difference:.2g} after the last step, "
            f"{worst.difference / moved:.2g} times what the learning rate moved them; gradients are equal",
            "suspect the optimizer: its state, weight decay, or which parameters it holds",
        )
    if report.torn:
        return Verdict(
            False,
            f"the copies of {report.torn[0]} on several ranks are no longer equal bit for bit"
            + (f", nor those of {len(report.torn) - 1} more" if len(report.torn) > 1 else ""),
            "suspect a reduction that reaches some copies only: they will drift apart",
        )
    return Verdict(True, _agreement(report))


def skipped(step: StepReport) -> bool:
    """Whether both sides skipped the step because its gradients overflow float16."""
    return not (math.isfinite(step.grad_norm.one_process) or math.isfinite(step.grad_norm.layout))


def relative(gradients: Sequence[Difference]) -> list[float]:
    """Differences as fractions of the largest element of the same parameter, or of FLOOR of the largest."""
    floor = FLOOR * max((g.largest for g in gradients), default=0.0)
    return [g.difference / max(g.largest, floor) if g.largest or floor else g.difference for g in gradients]


def _of_step(step: StepReport, tolerance: Tolerance) -> Verdict | None:
    """What is wrong with a step, None where nothing is."""
    if not step.loss.difference <= tolerance.loss:
        return Verdict(
            False,
            f"the first difference is in the loss of step {step.step}: {step.loss.one_process:.10g} on one "
            f"process, {step.loss.layout:.10g} on the layout",
            _hint_of_loss(step, tolerance),
        )
    if skipped(step):
        return None
    wrong = _wrong(step, tolerance)
    if wrong:
        # gradients come from the end of the model: what is right behind the last wrong one is the suspect
        first = wrong[-1]
        off = dict(zip(step.gradients, relative(step.gradients), strict=True))[first]
        return Verdict(
            False,
            f"the first difference is in the gradient of {first.name} at step {step.step}: {off:.2g} of its "
            f"largest element; {len(wrong)} of {len(step.gradients)} parameters differ",
            _hint_of_gradients(wrong, step.gradients),
        )
    norm = step.grad_norm
    if not norm.difference <= tolerance.gradient * abs(norm.one_process):
        return Verdict(
            False,
            f"the first difference is in the gradient norm of step {step.step}: {norm.one_process:.10g} on "
            f"one process, {norm.layout:.10g} on the layout; the gradients are equal",
            "suspect what counts in the norm: each part once over tp, pp and dp",
        )
    return None


def _wrong(step: StepReport, tolerance: Tolerance) -> list[Difference]:
    """Gradients beyond the tolerance, in backward's order reversed; the token table, used at both ends of
    the model, first."""
    off = zip(step.gradients, relative(step.gradients), strict=True)
    return [gradient for gradient, by in off if not by <= tolerance.gradient]


def _hint_of_loss(step: StepReport, tolerance: Tolerance) -> str:
    if step.step > 1:
        return "the gradients of the steps before are equal: suspect the update, or the samples of this step"
    factor = common_factor(step.gradients)
    if factor is not None and _wrong(step, tolerance):
        return (
            f"all gradients are {factor:.6g} times those of one process: suspect what the loss is divided by"
        )
    return (
        "the forward pass differs: suspect how weights are cut (the order of the qkv rows), a sum over tp, "
        "dropout masks, or which samples each replica reads"
    )


def _hint_of_gradients(wrong: Sequence[Difference], gradients: Sequence[Difference]) -> str:
    factor = common_factor(gradients)
    if factor is not None and len(wrong) == len(gradients):
        return (
            f"all gradients are {factor:.6g} times those of one process: suspect what the loss is divided "
            "by, or a sum over dp that is missing or made twice"
        )
    if [gradient.name for gradient in wrong] == [gradients[0].name]:
        return (
            "only the table that embedding and head share is wrong: suspect the sum over the first and the "
            "last stage"
        )
    if all(gradient.replicated for gradient in wrong):
        return (
            "only parameters that every tp rank holds are wrong: suspect the sum of their gradients over tp "
            "(sequence_parallel=true)"
        )
    behind = [gradient.name for gradient in gradients[gradients.index(wrong[-1]) + 1 :]]
    if not behind:
        return "the whole backward pass is wrong: suspect its beginning, the loss and the head"
    return (
        f"{behind[0]} is right and what comes before it is wrong: suspect the gradient of its layer's input"
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
    """How equal, in words."""
    counted = [step for step in report.steps if not skipped(step)]
    losses = max(step.loss.difference for step in report.steps)
    gradients = max(by for step in counted for by in relative(step.gradients))
    weights = max(weight.difference for weight in report.weights)
    moved = sum(step.lr for step in report.steps)
    copies = f"; {report.replicated} parameters held in copies, all bit-equal" if report.replicated else ""
    return (
        f"losses to {losses:.1e}, gradients to {gradients:.1e} of the largest of each, weights to "
        f"{weights / moved:.1e} of what the learning rate moves them{copies}"
    )
