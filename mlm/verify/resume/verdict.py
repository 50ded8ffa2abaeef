"""Comparison of a killed and resumed run with an undisturbed one: every step, then every tensor."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.compare import Comparison, TensorDifference
from mlm.checkpoint.native.lineage import LINEAGE
from mlm.optim.adamw import MOMENTS
from mlm.tracking.history import read_records
from mlm.training.state import INCIDENTS
from mlm.verify.parity.verdict import FLOOR, TOLERANCES, Tolerance, Verdict
from mlm.verify.resume.config import KillPlan

Records = Mapping[int, Mapping[str, Any]]
"""Step → its record of metrics.jsonl."""

FIELDS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "loss_scale": "loss scale",
    "skipped_steps": "count of skipped steps",
    "tokens": "count of consumed tokens",
}
"""Compared fields of each step, and their names in words."""
NO_COUNTERS = ("config", "versions", LINEAGE)
"""Entries of a checkpoint's state that are not counters."""
FIRST, SECOND = MOMENTS


@dataclass(frozen=True)
class Runs:
    """Records of both runs."""

    plan: KillPlan
    straight: Records
    resumed: Records
    """Up to plan.kill of the run that was killed, then of the one that resumed it."""
    starts: tuple[int, ...]
    """Step at which each start of the resumed run began."""
    final: Comparison
    """Of the checkpoints of the last step, the straight run's first."""


@dataclass(frozen=True)
class Allowed:
    """Tolerance between the second half and the straight run's."""

    tolerance: Tolerance | None
    """None: not by a bit."""
    precision: str

    def step_differs(self, field: str, straight: Any, resumed: Any) -> bool:
        """True if a number of a step is beyond the tolerance; null (not finite) equals only null."""
        if straight == resumed:
            return False
        limits = {} if self.tolerance is None else {"loss": self.tolerance.loss}
        if self.tolerance is not None and straight is not None:
            limits["grad_norm"] = self.tolerance.norm * abs(straight)
        if field not in limits or straight is None or resumed is None:
            return True
        return not abs(straight - resumed) <= limits[field]

    def incidents_differ(self, straight: Any, resumed: Any) -> bool:
        """True if the memories of incidents differ: losses and norms beyond the tolerance, counts at all."""
        if isinstance(straight, Mapping) and isinstance(resumed, Mapping):
            return straight.keys() != resumed.keys() or any(
                self.incidents_differ(straight[key], resumed[key]) for key in straight
            )
        if isinstance(straight, list) and isinstance(resumed, list):
            return len(straight) != len(resumed) or any(map(self.incidents_differ, straight, resumed))
        if self.tolerance is None or not isinstance(straight, float) or not isinstance(resumed, float):
            return bool(straight != resumed)
        return not abs(straight - resumed) <= max(self.tolerance.loss, self.tolerance.norm * abs(straight))

    def tensor_limit(self, tensor: TensorDifference, moved: float, largest: Callable[[str], float]) -> float:
        """The largest difference that an element may have.

        `moved` is the learning rates of the second half added up, `largest(kind)` the largest element of
        all tensors of a kind.
        """
        if self.tolerance is None:
            return 0.0
        kind = kind_of(tensor.name)
        if kind == "model":
            return self.tolerance.weight * moved
        # the second moment is a mean of squares: relative differences double
        share = self.tolerance.later * (2 if kind.endswith(SECOND) else 1)
        return share * max(tensor.scale, FLOOR * largest(kind))


def allowed(precision: str, *, same_layout: bool) -> Allowed:
    """Bit for bit on the same layout; to the rounding of `precision` on another."""
    return Allowed(None if same_layout else TOLERANCES[precision], precision)


def kind_of(name: str) -> str:
    """`model`, `optimizer.exp_avg` or `optimizer.exp_avg_sq`: what a checkpoint's tensor is."""
    parts = name.split(".")
    return parts[0] if parts[0] == "model" else ".".join(parts[:2])


def read_steps(metrics: Path) -> dict[int, dict[str, Any]]:
    """The record of each step in a metrics.jsonl. Raises OSError."""
    return {record["step"]: record for record in read_records(metrics) if record["kind"] == "step"}


def read_starts(metrics: Path) -> tuple[int, ...]:
    """Steps done at each start of a run. Raises OSError."""
    return tuple(record["start_step"] for record in read_records(metrics) if record["kind"] == "run")


def judge(runs: Runs, may: Allowed) -> Verdict:
    """The verdict, which names the first difference."""
    finders: tuple[Callable[[], Verdict | None], ...] = (
        lambda: _of_starts(runs),
        lambda: _of_steps(runs, may),
        lambda: _of_counters(runs, may),
        lambda: _of_tensors(runs, may),
    )
    found = (finder() for finder in finders)
    return next(filter(None, found), None) or Verdict("EQUAL", _agreement(runs, may))


def _different(sentence: str, hint: str = "") -> Verdict:
    return Verdict("DIFFERENT", sentence, hint)


def _of_starts(runs: Runs) -> Verdict | None:
    plan = runs.plan
    if runs.starts == (plan.first, plan.kill):
        return None
    began = ", ".join(map(str, runs.starts)) or "nowhere"
    return _different(
        f"the killed run should have gone on from step {plan.kill}, but its starts were at: {began}",
        "the checkpoint was not found, or found damaged; see the log of the resumed run",
    )


def _of_steps(runs: Runs, may: Allowed) -> Verdict | None:
    plan, exactly = runs.plan, Allowed(None, may.precision)
    for step in range(plan.first + 1, plan.last + 1):
        a, b = runs.straight.get(step), runs.resumed.get(step)
        if a is None or b is None:
            which = "straight" if a is None else "resumed"
            return _different(f"the first difference is at step {step}: the {which} run has no record of it")
        limit = may if step > plan.kill else exactly
        for field, words in FIELDS.items():
            if limit.step_differs(field, a[field], b[field]):
                return _different(
                    f"the first difference is in the {words} of step {step}: {_number(a[field])} straight, "
                    f"{_number(b[field])} {'resumed' if step > plan.kill else 'before the kill'}",
                    _hint_of_step(step, field, plan),
                )
    return None


def _hint_of_step(step: int, field: str, plan: KillPlan) -> str:
    if step <= plan.kill:
        return (
            "the run does not repeat itself even where nothing was resumed: on a GPU add deterministic=true, "
            "since the backward pass of its fastest attention repeats no bits; else suspect an operation "
            "that is not deterministic on this device"
        )
    if field in ("lr", "loss_scale", "skipped_steps", "tokens"):
        return "suspect the counters in the checkpoint's state"
    if step == plan.kill + 1 and field == "loss":
        return "suspect the weights that were loaded, the position in the data, or the dropout masks"
    if step == plan.kill + 1:
        return "the loss is right, so weights and samples are: suspect the backward pass of the layout"
    return "the step after the kill is right: suspect the moments, or the position in the data"


def _of_counters(runs: Runs, may: Allowed) -> Verdict | None:
    first, second = runs.final.first.state, runs.final.second.state
    for key in sorted((first.keys() | second.keys()) - set(NO_COUNTERS)):
        a, b = first.get(key), second.get(key)
        if may.incidents_differ(a, b) if key == INCIDENTS else a != b:
            return _different(
                f"the first difference is in {key} of the last checkpoint's state: {a} straight, {b} resumed",
                "every step was equal: suspect what is saved of this counter",
            )
    return None


def _of_tensors(runs: Runs, may: Allowed) -> Verdict | None:
    final = runs.final
    forms = [form.name for form in final.forms]
    for name in sorted([*final.only_first, *final.only_second, *forms]):
        return _different(f"{name} of the last checkpoint is not in both runs, or not of one shape and dtype")
    wrong = beyond(runs, may)
    if not wrong:
        return None
    worst = wrong[0]
    return _different(
        f"the first difference is in the last checkpoint: {worst.name} differs in {worst.differing:,} of "
        f"{worst.elements:,} elements, by up to {worst.largest:.2g} of {worst.scale:.2g}, and "
        f"{len(wrong) - 1} more tensors of {len(final.tensors)} do",
        "every step was equal, the last one's update is not: suspect the optimizer's state",
    )


def beyond(runs: Runs, may: Allowed) -> list[TensorDifference]:
    """Tensors of the last checkpoint that differ more than they may, the most different first."""
    moved = moved_by(runs)
    largest = _largest_of_kinds(runs.final.tensors)
    return [
        tensor
        for tensor in runs.final.differing
        if may.tolerance is None or not tensor.largest <= may.tensor_limit(tensor, moved, largest)
    ]


def moved_by(runs: Runs) -> float:
    """Learning rates of the second half added up: about how far Adam moves a weight."""
    return math.fsum(record["lr"] for step, record in runs.straight.items() if step > runs.plan.kill)


def _largest_of_kinds(tensors: Iterable[TensorDifference]) -> Callable[[str], float]:
    largest: dict[str, float] = {}
    for tensor in tensors:
        kind = kind_of(tensor.name)
        largest[kind] = max(largest.get(kind, 0.0), tensor.scale)
    return lambda kind: largest.get(kind, 0.0)


def step_difference(runs: Runs, step: int) -> float | None:
    """|resumed - straight| of a step's loss; None where one of them is not finite or missing."""
    straight, resumed = (side.get(step, {}).get("loss") for side in (runs.straight, runs.resumed))
    return None if straight is None or resumed is None else float(abs(resumed - straight))


def _agreement(runs: Runs, may: Allowed) -> str:
    """The agreement in words."""
    steps, final = runs.plan.last - runs.plan.first, runs.final
    elements = sum(tensor.elements for tensor in final.tensors)
    counted = f"{steps} steps, then {len(final.tensors)} tensors of {elements:,} elements"
    if may.tolerance is None:
        return f"loss, gradient norm, learning rate, loss scale and samples of {counted}"
    losses = max((step_difference(runs, step) or 0.0 for step in runs.straight), default=0.0)
    moved = moved_by(runs)
    weights = max((t.largest for t in final.tensors if kind_of(t.name) == "model"), default=0.0)
    moments = max((t.relative for t in final.tensors if kind_of(t.name) != "model"), default=0.0)
    return (
        f"{counted}: losses to {losses:.1e}, weights to {weights / moved if moved else 0:.1e} of what the "
        f"learning rate moves them, moments to {moments:.1e} of the largest of each"
    )


def _number(value: Any) -> str:
    return "not finite" if value is None else repr(value)
