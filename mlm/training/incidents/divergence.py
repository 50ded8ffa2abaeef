"""Diagnosis of a run that has diverged: where numbers are not finite, since when, and the way back."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import step_directory_name
from mlm.checkpoint.native.format import TensorEntry, read_manifest_head
from mlm.checkpoint.native.norms import (
    largest_jump,
    norm,
    not_finite_problem,
    with_norms,
)
from mlm.checkpoint.native.retention import newest_good
from mlm.checkpoint.native.save_load import stored_tensors
from mlm.optim.schedule import learning_rate
from mlm.training.incidents.probe import Probe, describe_place, gather
from mlm.training.incidents.watcher import Incidents
from mlm.training.observer import Observer
from mlm.training.state import CHECKPOINTS, owned_shards
from mlm.training.trainer import StepOutcome, Trainer
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

    def after_step(self, outcome: StepOutcome) -> None:
        """Raise DivergedError with a diagnosis. Collective then."""
        memory, trainer = self.incidents.memory, self.incidents.trainer
        if not memory.since or not 0 < self.incidents.settings.patience <= memory.streak:
            return
        text, good = diagnosis(trainer, self.incidents.batches, memory.since, self.warmup_key)
        record = {"step": trainer.step, "since": memory.since, "good": good and good.name}
        self.incidents.reporter.event("diverged", record)
        raise DivergedError(text)


def diagnosis(trainer: Trainer, batches: Sequence[Any], since: int, warmup: str) -> tuple[str, Path | None]:
    """Why the steps from `since` on are not finite and the way back, in a line; the newest good checkpoint.

    `batches` are those of the newest step, `warmup` is the setting of the warm-up. Collective over all ranks,
    and the same on every one.
    """
    config, ranks, root = trainer.config, Ranks.of(trainer.ctx), Path(trainer.config.out, CHECKPOINTS)
    precision, probe = config.precision, Probe(trainer)
    probe.run(batches)
    place = gather(probe, trainer.ctx).first_bad
    where = f"the first number that is not finite is in {describe_place(place)}" if place else FINITE
    lr = learning_rate(since, config.optimizer, config.schedule, config.train.steps)
    cause = (
        f"gradients still overflow at precision.min_loss_scale={precision.min_loss_scale:g}"
        if trainer.scaler.dynamic
        else f"loss or gradients are not finite in precision={precision.dtype}"
    )
    parts = ranks.gather({name: norm(x) for name, x in stored_tensors(owned_shards(trainer)).items()})
    text, good = "", None
    if ranks.is_main:
        with suppress(UserError, OSError):
            good = newest_good(root, since)
        advice = f"a lower optimizer.lr, a higher {warmup}" + (
            " or precision=bf16" if trainer.scaler.dynamic else ""
        )
        text = f"step {trainer.step}: {cause} since step {since}, where the learning rate was {lr:.4g}; "
        text += f"{describe_state(parts, good)}; {where}. {describe_way_back(config.out, good, advice)}"
    text, name = ranks.broadcast([text, good and str(good)])
    return text, name and Path(name)


def describe_state(parts: Sequence[Mapping[str, float]], good: Path | None) -> str:
    """State of weights and moments in words: what is not finite, or has grown since a good checkpoint."""
    try:
        then = {} if good is None else read_manifest_head(good).tensors
    except (UserError, OSError):
        then = {}
    names = sorted({name for part in parts for name in part})
    blank = TensorEntry((), torch.float32, ())
    before = {name: entry.norm for name, entry in then.items()}
    now = with_norms({name: then.get(name, blank) for name in names}, parts, before)
    if problem := not_finite_problem(now):
        return problem
    jump = largest_jump(now)
    grown = f", but the norm of {jump[0]} is {jump[1]:.3g} times that in {good and good.name}" if jump else ""
    return f"the weights are finite{grown}"


def describe_way_back(out: str, good: Path | None, advice: str) -> str:
    """The newest good checkpoint and the command that goes back to it, in words."""
    if good is None:
        return f"No good checkpoint is left: start again with another out=… and {advice}"
    command = ["mlm", "ckpt", "rollback", out, str(int(step_directory_name(good).removeprefix("step-")))]
    return f"Newest good checkpoint: {good}. Go back with `{shlex.join(command)}`, then resume with {advice}"
