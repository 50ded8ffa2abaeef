"""The end of a run that has diverged: where numbers are not finite, since when, and the way back."""

import shlex
from contextlib import suppress
from pathlib import Path

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import step_directory_name
from mlm.checkpoint.native.retention import newest_good
from mlm.optim.schedule import learning_rate
from mlm.training.incidents.probe import StepProbe, describe_place
from mlm.training.incidents.watcher import Incidents
from mlm.training.observer import Observer
from mlm.training.state import CHECKPOINTS
from mlm.training.trainer import StepOutcome
from mlm.util.errors import UserError

FINITE = "all activations and gradients of this step are finite, if not the sum of the gradients' squares"


class DivergedError(UserError):
    """Steps have not been finite for too long: the run ends."""


class DivergenceStop(Observer):
    """Ends a run after incident.patience steps in a row that were not finite.

    `warmup_key` is the setting of the warm-up, which the error names.
    """

    def __init__(self, incidents: Incidents, warmup_key: str) -> None:
        self.incidents, self.warmup_key = incidents, warmup_key
        self.trainer, self.reporter = incidents.trainer, incidents.reporter

    def after_step(self, outcome: StepOutcome) -> None:
        """Raise DivergedError with a diagnosis. Collective then."""
        memory = self.incidents.memory
        if not memory.since or not 0 < self.incidents.settings.patience <= memory.streak:
            return
        good = self.newest_good(memory.since)
        record = {"step": self.trainer.step, "since": memory.since, "good": good and good.name}
        self.reporter.event("diverged", record)
        raise DivergedError(self.diagnosis(memory.since, good))

    def newest_good(self, since: int) -> Path | None:
        """Return the newest good checkpoint before step `since`. Collective."""
        ranks, good = Ranks.of(self.trainer.ctx), None
        with suppress(UserError, OSError):
            if ranks.is_main:
                good = str(newest_good(Path(self.trainer.config.out, CHECKPOINTS), since) or "")
        name = ranks.broadcast(good)
        return Path(name) if name else None

    def diagnosis(self, since: int, good: Path | None) -> str:
        """Why the steps from `since` on are not finite and the way back, in a line. Collective."""
        trainer, config = self.trainer, self.trainer.config
        probe = StepProbe(trainer)
        probe.run(self.incidents.batches)
        place = probe.gather().first_bad
        where = f"the first number that is not finite is in {describe_place(place)}" if place else FINITE
        lr = learning_rate(since, config.optimizer, config.schedule, config.train.steps)
        cause = f"loss or gradients are not finite in precision={config.precision.dtype}"
        advice = f"a lower optimizer.lr, a higher {self.warmup_key}"
        if trainer.scaler.dynamic:
            floor = config.precision.min_loss_scale
            cause = f"gradients still overflow at precision.min_loss_scale={floor:g}"
            advice += " or precision=bf16"
        text = (
            f"step {trainer.step}: {cause} since step {since}, where the learning rate was {lr:.4g}; {where}"
        )
        return f"{text}. {describe_way_back(config.out, good, advice)}"


def describe_way_back(out: str, good: Path | None, advice: str) -> str:
    """The newest good checkpoint and the command that goes back to it, in words."""
    if good is None:
        return f"No good checkpoint is left: start again with another out=… and {advice}"
    command = ["mlm", "ckpt", "rollback", out, str(int(step_directory_name(good).removeprefix("step-")))]
    return f"Newest good checkpoint: {good}. Go back with `{shlex.join(command)}`, then resume with {advice}"
