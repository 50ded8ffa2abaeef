"""Observers watch a run without being part of its step.

Logging, saving, incidents, profiles and sample prompts are observers, as are the classes of
`train.observers=[my_module:MyObserver]` (named_observers.py). A run calls its list (`Loop.observers`) in
order, on every rank, at these points of a step:

    phase("data")             the micro-batches are read
    on_step_start
    phase("forward"), phase("backward"), phase("weight"), on_receive, on_micro_batch
    phase("reduce")           gradients are summed over ranks
    before_update             gradients and their norm are known; may skip the update
    before_weights_change
    phase("optimizer")
    after_step
    phase("validation"), after_validation       where due
    before_save, phase("saving")                where due

A method that is not overridden costs a call. One that reads a tensor (`item()`, `tolist()`) waits for the
device; one that communicates must be reached on all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlm.parallel.pipeline.engine import NOTHING, PlanObserver
from mlm.tracking.reporter import Reporter


@dataclass(frozen=True)
class StepOutcome:
    """Results of a step, still on the device."""

    parts: Tensor
    """[k]: this rank's share of each part of the objective, means over the global batch."""
    grad_norm: Tensor
    """0-d: global gradient norm before clipping."""
    lr: float
    """Learning rate used."""


@dataclass(frozen=True)
class DeferredCheck:
    """A decision on an update whose numbers travel to the host while the device applies the update.

    For optimizers that change nothing if `hold` is 1.0 (`mlm.optim.adamw.can_defer`).
    """

    hold: Tensor
    """0-d on the device: 1.0 delays the update until `decide` is called, 0.0 applies it."""
    decide: Callable[[], bool | None]
    """Return None if `hold` is 0.0; else True to apply the update now, False to skip it. Waits."""


class RewindRequested(Exception):  # noqa: N818, as it is not an error
    """Raised in `after_step` on all ranks: training continues from an earlier checkpoint."""

    def __init__(self, rewind: Callable[[], None]) -> None:
        super().__init__()
        self.rewind = rewind
        """Load the checkpoint into the trainer. Collective."""


class Observer(PlanObserver):
    """Watches a run. All methods do nothing by default."""

    def on_run_start(self, trainer: Any, reporter: Reporter) -> None:
        """Training continues from step `trainer.step`: the run starts, or has returned to a checkpoint.

        `trainer` is the `mlm.training.trainer.Trainer`. `reporter.measured(step, values)` reports numbers to
        metrics.jsonl, TensorBoard and W&B alike; `reporter.note(text)` shows a line,
        `reporter.event(kind, fields)` adds a record to metrics.jsonl.
        """

    def on_step_start(self, batches: Sequence[Any]) -> None:
        """A step starts with these micro-batches of this rank."""

    def before_update(self, parts: Tensor, grad_norm: Tensor) -> DeferredCheck | bool | None:
        """Gradients are summed over ranks: `shard.parameter.grad` times the loss scale, not yet clipped.

        Args:
            parts: [k], this rank's share of each part of the objective.
            grad_norm: 0-d, before clipping. Both may be overwritten if gradients are computed again.

        Returns:
            True to skip the update, on all ranks; or a check that decides later.
        """

    def before_weights_change(self) -> None:
        """Weights and moments change next: wait for copies of them."""

    def after_step(self, outcome: StepOutcome) -> None:
        """The step is done and counted in `trainer.step`. May raise UserError, which ends the run."""

    def after_validation(self) -> None:
        """A validation was reported."""

    def before_save(self) -> None:
        """A checkpoint is saved next: put the state of a resumed run into `trainer.extra_state`."""

    def on_run_end(self) -> None:
        """No step follows: all are done, or a stop was requested. Not called after an error."""


class Observers(Observer):
    """Calls each observer of a list, in order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.list = list(observers)
        for name in CALLED_IN_TURN:
            setattr(self, name, partial(self._call_each, name))

    def _call_each(self, name: str, *arguments: object) -> None:
        for observer in self.list:
            getattr(observer, name)(*arguments)

    def phase(self, name: str) -> AbstractContextManager[None]:
        contexts = [context for observer in self.list if (context := observer.phase(name)) is not NOTHING]
        return _enter_all(contexts) if contexts else NOTHING

    def before_update(self, parts: Tensor, grad_norm: Tensor) -> DeferredCheck | None:
        """Combine all decisions into one check; None if nothing is skipped or held."""
        answers = [observer.before_update(parts, grad_norm) for observer in self.list]
        checks = [check for check in answers if isinstance(check, DeferredCheck)]
        if True in answers:
            checks.append(DeferredCheck(torch.ones_like(grad_norm), lambda: False))
        if len(checks) < 2:
            return checks[0] if checks else None

        def decide() -> bool | None:
            decisions = [check.decide() for check in checks]
            return None if all(decision is None for decision in decisions) else False not in decisions

        return DeferredCheck(torch.stack([check.hold for check in checks]).amax(), decide)


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


CALLED_IN_TURN = tuple(
    name
    for owner in (PlanObserver, Observer)
    for name in vars(owner)
    if not name.startswith("_") and name not in ("phase", "before_update")
)
"""Methods of an observer that return nothing."""
