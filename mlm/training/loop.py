"""The training loop, with hooks for what pretraining and finetuning do differently."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mlm.launch.stop import StopRequest
from mlm.tracking.metrics import Parts, Rates, StepMetrics, Throughput
from mlm.tracking.peak import memory_bytes
from mlm.tracking.reporter import Reporter
from mlm.training.hooks import Hooks
from mlm.training.saver import Saver
from mlm.training.trainer import StepOutcome, StopVote, Trainer

SOON_S = 5.0
"""Seconds that are not worth an estimate."""
Batches = list[Any]
"""The micro-batches of one step on this rank."""


@dataclass
class Loop(ABC):
    """Train step by step, and log, validate, save and stop when due.

    Subclasses define the batches, the validation and the end of training.
    """

    trainer: Trainer
    reporter: Reporter
    throughput: Throughput
    stop: StopRequest
    saver: Saver
    is_stopping: bool = field(default=False, init=False)
    """True once any rank was asked to stop, as all ranks agree."""
    stops_after: int = field(default=1, init=False)
    """Step after which a stop requested now takes effect."""
    begun: tuple[int, float] = field(default=(1, math.inf), init=False)
    """The step in progress, and the time at which it began."""
    step_time: float | None = field(default=None, init=False)
    """Seconds of a step, as last logged."""
    hooks: Hooks = field(default_factory=Hooks, init=False)
    """Hooks that watch the steps."""

    warmup_key: ClassVar[str]
    """Setting of the warm-up, which the error of a diverged run names."""

    def run(self) -> bool:
        """Train until done; return False if a stop was requested before."""
        self.stop.last_step = self.last_step
        while (is_finished := self.run_steps()) is None:
            self.throughput.pause()
            self.hooks.rewind()
        self.hooks.close()
        return is_finished

    def run_steps(self) -> bool | None:
        """Train until done, stopped (False), or to return to a checkpoint (None)."""
        trainer, hooks, every = self.trainer, self.hooks, self.trainer.config.log.every
        save_due = False
        with self.batches() as batches_of_steps:
            self.throughput.start()
            while not self.is_done():
                self.begun, self.stops_after = (trainer.step + 1, time.monotonic()), trainer.step + 1
                with hooks.timed("data"):
                    batches = next(batches_of_steps)
                hooks.begin(batches)
                parts = trainer.forward_backward(batches)
                vote = StopVote(trainer.ctx, lambda: self.stop.requested)
                self.stops_after += not vote.is_open
                outcome = trainer.update(parts)
                self.is_stopping, last = vote.result(), self.is_done()
                if hooks.must_rewind():
                    return None
                hooks.end()
                self.count()
                self.saver.poll()
                if last or self.is_stopping or trainer.step == 1 or is_due(trainer.step, every):
                    self.log(outcome, batches)
                hooks.stop_if_diverged(self.warmup_key)
                validated = self.is_validation_due(last)
                if validated:
                    self.validate(batches)
                    last, self.is_stopping = self.is_done(), self.is_stopping or vote.asked_since()
                self.stops_after = trainer.step + 1
                save_due |= self.is_save_due(validated)  # waits for a step that is finite
                if last or self.is_stopping or (save_due and hooks.is_finite()):
                    self.save(batches, awaited=last or self.is_stopping)
                    save_due = False
                if self.is_stopping and not last:
                    return False
        return True

    @property
    @abstractmethod
    def validate_every(self) -> int:
        """Steps between validations; 0 never validates."""

    @abstractmethod
    def batches(self) -> AbstractContextManager[Iterator[Batches]]:
        """This rank's micro-batches of each step, from the next step on."""

    @abstractmethod
    def score(self) -> None:
        """Validate and report the results."""

    @abstractmethod
    def tokens(self) -> int:
        """Tokens trained on so far, over all ranks and attempts."""

    def last_step(self) -> str:
        """Words for the step after which a stop requested now takes effect: `step 12 (about 3 min)`."""
        step, (current, since) = self.stops_after, self.begun
        if self.step_time is None:
            return f"step {step}"
        left = self.step_time * (step - current + 1) - (time.monotonic() - since)
        return f"step {step} (about {roughly(left)})" if left >= SOON_S else f"step {step}"

    def parts(self, means: Sequence[float], rates: Rates) -> Parts:
        """Numbers to report of a step in addition to its loss."""
        return {}

    def is_done(self) -> bool:
        """True if training is over."""
        return self.trainer.step >= self.trainer.config.train.steps

    def is_validation_due(self, last: bool) -> bool:
        """True if a validation is due; the last step is always validated."""
        return self.validate_every > 0 and (last or is_due(self.trainer.step, self.validate_every))

    def is_save_due(self, validated: bool) -> bool:
        """True if a checkpoint is due; the last step is always saved."""
        return is_due(self.trainer.step, self.trainer.config.checkpoint.save_every)

    def count(self) -> None:
        """Count the step that was just taken."""
        self.throughput.count()
        self.reporter.advance(self.trainer.step)

    def log(self, outcome: StepOutcome, batches: Batches) -> None:
        """Read the step's numbers from the device and report them."""
        trainer = self.trainer
        means = trainer.mean_parts(outcome)  # waits for the device, so the clock may be read now
        rates, scaler = self.throughput.lap(), trainer.scaler
        self.step_time = rates.step_time_s
        self.reporter.step(
            StepMetrics(
                step=trainer.step,
                loss=math.fsum(means[: trainer.objective.losses]),
                lr=outcome.lr,
                grad_norm=float(outcome.grad_norm.item()),
                loss_scale=float(scaler.scale.item()) if scaler.dynamic else None,
                skipped_steps=int(scaler.skipped.item()),
                tokens=self.tokens(),
                tokens_per_s=rates.tokens_per_s,
                step_time_s=rates.step_time_s,
                tflops=rates.tflops,
                mfu=rates.mfu,
                memory_bytes=memory_bytes(trainer.ctx.device),
                parts=self.parts(means, rates),
            )
        )

    def validate(self, batches: Batches) -> None:
        """Validate with the clock stopped."""
        self.throughput.pause()
        with self.hooks.timed("validation"):
            self.score()
        self.throughput.start()

    def save(self, batches: Batches, *, awaited: bool) -> None:
        """Begin a checkpoint; wait for it if it is the last."""
        self.throughput.pause()
        self.hooks.remember()
        with self.hooks.timed("saving"):
            self.saver.begin()
            if awaited:
                self.saver.finish()
        self.throughput.start()


def roughly(seconds: float) -> str:
    """Return seconds in one unit: 40 s, 3 min, 2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


def is_due(step: int, every: int) -> bool:
    """True if something done every `every` steps (0: never) is due after `step`."""
    return every > 0 and step % every == 0
