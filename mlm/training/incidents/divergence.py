"""The end of a run that has diverged: where numbers are not finite, since when, and the way back."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.format import TensorEntry, read_manifest_head
from mlm.checkpoint.native.norms import (
    largest_jump,
    norm,
    not_finite_problem,
    with_norms,
)
from mlm.checkpoint.native.save_load import stored_tensors
from mlm.optim.schedule import learning_rate
from mlm.training.incidents.probe import StepProbe, describe_place
from mlm.training.incidents.watcher import IncidentError, Incidents, describe_way_back, find_newest_good
from mlm.training.observer import Observer
from mlm.training.state import owned_shards
from mlm.training.trainer import StepOutcome
from mlm.util.errors import UserError

FINITE = "all activations and gradients of this step are finite, if not the sum of the gradients' squares"


class DivergenceStop(Observer):
    """Ends a run after incident.patience steps in a row that were not finite.

    `warmup_key` is the setting of the warm-up, which the error names.
    """

    def __init__(self, incidents: Incidents, warmup_key: str) -> None:
        self.incidents, self.warmup_key = incidents, warmup_key
        self.trainer, self.reporter = incidents.trainer, incidents.reporter

    def after_step(self, outcome: StepOutcome) -> None:
        """Raise IncidentError with a diagnosis. Collective then."""
        memory = self.incidents.memory
        if not memory.since or not 0 < self.incidents.settings.patience <= memory.streak:
            return
        good = find_newest_good(self.trainer, memory.since)
        record = {"step": self.trainer.step, "since": memory.since, "good": good and good.name}
        self.reporter.event("diverged", record)
        raise IncidentError(self.diagnosis(memory.since, good))

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
        return f"{text}; {self.describe_state(good)}. {describe_way_back(config.out, good, advice)}"

    def describe_state(self, good: Path | None) -> str:
        """State of weights and moments in words: not finite, or grown since `good`. Collective."""
        ranks, owned = Ranks.of(self.trainer.ctx), stored_tensors(owned_shards(self.trainer))
        parts = ranks.gather({name: norm(x) for name, x in owned.items()})  # only the main rank has all
        return str(ranks.broadcast(describe_weights(parts, good) if ranks.is_main else None))


def describe_weights(parts: Sequence[Mapping[str, float]], good: Path | None) -> str:
    """State of weights and moments in words, from the norms of their parts on all ranks."""
    try:
        then = {} if good is None else read_manifest_head(good).tensors
    except (UserError, OSError):
        then = {}
    names = sorted({name for part in parts for name in part})
    blank = TensorEntry((), torch.float32)
    before = {name: entry.norm for name, entry in then.items()}
    now = with_norms({name: then.get(name, blank) for name in names}, parts, before)
    if problem := not_finite_problem(now):
        return problem
    jump = largest_jump(now)
    if jump is None:
        return "the weights are finite"
    name, times = jump
    growth = f"{times:.3g} times that in {good and good.name}"
    return f"the weights are finite, but the norm of {name} is {growth}"
