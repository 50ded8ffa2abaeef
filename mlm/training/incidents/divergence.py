"""End of a diverged run: first bad tensor and step, and the checkpoint to continue from."""

import shlex
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import BEST, CHECKPOINTS, point_latest, step_of
from mlm.checkpoint.native.retention import newest_good
from mlm.checkpoint.native.save_load import CheckpointError
from mlm.optim.schedule import learning_rate
from mlm.training.incidents.probe import StepProbe, describe_place
from mlm.training.incidents.watcher import IncidentError, Incidents
from mlm.training.observer import Observer, StepOutcome
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError

FINITE = "all activations and gradients of this step are finite, if not the sum of the gradients' squares"


class DivergenceStop(Observer):
    """Fails a run after incident.patience steps in a row that were not finite, or at its end if in doubt.

    `warmup_key` is the setting of the warm-up, which the error names.
    """

    def __init__(self, incidents: Incidents, warmup_key: str) -> None:
        self.incidents, self.warmup_key = incidents, warmup_key
        self.trainer, self.reporter = incidents.trainer, incidents.reporter

    def after_step(self, outcome: StepOutcome) -> None:
        state = self.incidents.state
        if state.first_nonfinite_step and 0 < self.incidents.settings.patience <= state.nonfinite_steps:
            self.fail()

    def on_run_end(self) -> None:
        if self.incidents.end is not None and self.incidents.state.doubt:
            self.fail()

    def fail(self) -> NoReturn:
        """Point `latest` at the newest good checkpoint and raise IncidentError. Collective."""
        trainer, state = self.trainer, self.incidents.state
        with suppress(CheckpointError):  # a failed save was reported
            self.incidents.saver.finish()
        good = find_newest_good(trainer, state.doubt)
        record = {"step": trainer.step, "since": state.doubt, "good": good and good.name}
        self.reporter.event("diverged", record)
        advice = "another host" if state.differ else f"a lower optimizer.lr, a higher {self.warmup_key}"
        if state.first_nonfinite_step and trainer.scaler.dynamic:
            advice += " or precision=bf16"
        diagnosis, is_latest = self.diagnosis(), False
        if good is not None and trainer.ctx.is_main and (state.first_nonfinite_step or state.high):
            with suppress(UserError, OSError):
                point_latest(good.parent, step_of(good))
                is_latest = True
        is_latest = Ranks.of(trainer.ctx).broadcast(is_latest)
        recovery = describe_recovery(trainer.config.out, good, advice, is_latest=is_latest)
        raise IncidentError(f"{diagnosis}. {recovery}")

    def diagnosis(self) -> str:
        """Return a line on the cause and the step it began at. Collective."""
        trainer, config, state = self.trainer, self.trainer.config, self.incidents.state
        where = f"the run ends with {self.incidents.end}"
        if state.differ:
            cause = "replicas differ"
            where = "; ".join(self.incidents.differences) or where
        elif state.first_nonfinite_step:
            place = StepProbe(trainer).run(self.incidents.batches)[1]["first_not_finite"]
            where = f"the first number that is not finite is in {describe_place(place)}" if place else FINITE
            cause = f"loss or gradients are not finite in precision={config.precision.dtype}"
            if trainer.scaler.dynamic:
                floor = config.precision.min_loss_scale
                cause = f"gradients still overflow at precision.min_loss_scale={floor:g}"
        else:
            cause = f"losses are above {state.ceilings[1]:.4g}, far from the best,"
        lr = learning_rate(state.doubt, config.optimizer, config.schedule, config.train.steps)
        text = f"step {trainer.step}: {cause} since step {state.doubt}, where the learning rate was {lr:.4g}"
        return f"{text}; {where}"


def find_newest_good(trainer: Trainer, since: int | None) -> Path | None:
    """Return the newest good checkpoint before step `since` (None: of all), or the best one. Collective."""
    ranks, good, out = Ranks.of(trainer.ctx), None, Path(trainer.config.out)
    for root in (out / CHECKPOINTS, out / BEST / CHECKPOINTS) if ranks.is_main else ():
        with suppress(UserError, OSError):
            good = good or newest_good(root, since)
    name = ranks.broadcast(good and str(good))
    return Path(name) if name else None


def describe_recovery(out: str, good: Path | None, advice: str, *, is_latest: bool = False) -> str:
    """Describe the newest good checkpoint and how to continue from it; `is_latest` if `latest` names it."""
    if good is None:
        return f"No good checkpoint is left: start again with another out=… and {advice}"
    if good.parent.parent.name == BEST:
        return f"The best checkpoint is good, {good}: to train on, start with another out=… and {advice}"
    if is_latest:
        return f"Newest good checkpoint: {good}. latest names it: resume with {advice}"
    command = ["mlm", "ckpt", "rollback", out, str(step_of(good))]
    return f"Newest good checkpoint: {good}. Go back with `{shlex.join(command)}`, then resume with {advice}"
