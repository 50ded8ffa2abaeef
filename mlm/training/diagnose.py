"""Diagnosis of a run that has diverged: where numbers are not finite, since when, and the way back."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import plain_name
from mlm.checkpoint.native.format import TensorEntry, read_summary
from mlm.checkpoint.native.norms import (
    describe_not_finite,
    first_not_finite,
    largest_jump,
    norm,
    with_norms,
)
from mlm.checkpoint.native.retention import newest_good
from mlm.checkpoint.native.save_load import stored_tensors
from mlm.optim.clip import gradient_norm
from mlm.optim.schedule import learning_rate
from mlm.parallel.collectives import all_reduce
from mlm.training.state import CHECKPOINTS, owned_shards
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError


class DivergedError(UserError):
    """Steps have not been finite for too long: the run ends."""


def first_non_finite(trainer: Trainer, batches: list[Any]) -> str:
    """A sentence that names the first non-finite place of a step on these micro-batches.

    Forward order for activations; if all are finite, backward order for gradients. Collective over all
    ranks, and the same sentence on every one: a place counts if it is non-finite anywhere.
    """
    with torch.device("meta"):  # every stage's names, in the order they run, known on every rank
        whole = trainer.config.model.family.model(trainer.config.model, tp=trainer.ctx.tp)
    names = [name for name, module in whole.named_modules() if name and not list(module.children())]
    bad = torch.zeros(len(names), device=trainer.ctx.device)
    handles = [
        module.register_forward_hook(_watch(bad, names.index(name)))
        for chunk in trainer.model.chunks
        for name, module in chunk.named_modules()
        if name in names
    ]
    try:
        trainer.forward_backward(batches)
    finally:
        for handle in handles:
            handle.remove()
    where = _first(names, _anywhere(bad, trainer))
    if where is not None:
        return f"the first non-finite activation is the output of {where}"
    backward = [name for name, _ in whole.named_parameters()][::-1]
    bad = torch.zeros(len(backward), device=trainer.ctx.device)
    for shard in trainer.shards:
        grad = shard.parameter.grad
        if grad is not None:
            bad[backward.index(shard.name)] += (~grad.isfinite()).sum()
    where = _first(backward, _anywhere(bad, trainer))
    if where is not None:
        return f"activations are finite; the first non-finite gradient is that of {where}"
    if not gradient_norm(trainer.shards, trainer.ctx).isfinite():
        return "activations and gradients are finite, but the sum of the gradients' squares overflows"
    return "all activations and gradients of this step are finite when it is repeated"


def diagnosis(trainer: Trainer, batches: list[Any], since: int, warmup: str) -> tuple[str, Path | None]:
    """Why the steps from `since` on are not finite and the way back, in a line; the newest good checkpoint.

    `batches` are those of the newest step, `warmup` is the setting of the warm-up. Collective over all ranks,
    and the same on every one.
    """
    config, ranks, root = trainer.config, Ranks.of(trainer.ctx), Path(trainer.config.out, CHECKPOINTS)
    precision, where = config.precision, first_non_finite(trainer, batches)
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
        text += f"{state_of(parts, good)}; {where}. {way_back(config.out, good, advice)}"
    text, name = ranks.broadcast([text, good and str(good)])
    return text, name and Path(name)


def state_of(parts: Sequence[Mapping[str, float]], good: Path | None) -> str:
    """State of weights and moments in words: what is not finite, or has grown since a good checkpoint."""
    try:
        then = {} if good is None else read_summary(good).tensors
    except (UserError, OSError):
        then = {}
    names = sorted({name for part in parts for name in part})
    blank = TensorEntry((), torch.float32, ())
    before = {name: entry.norm for name, entry in then.items()}
    now = with_norms({name: then.get(name, blank) for name in names}, parts, before)
    if (name := first_not_finite(now)) is not None:
        return describe_not_finite(name)
    jump = largest_jump(now)
    grown = f", but the norm of {jump[0]} is {jump[1]:.3g} times that in {good and good.name}" if jump else ""
    return f"the weights are finite{grown}"


def way_back(out: str, good: Path | None, advice: str) -> str:
    """The newest good checkpoint and the command that goes back to it, in words."""
    if good is None:
        return f"No good checkpoint is left: start again with another out=… and {advice}"
    command = ["mlm", "ckpt", "rollback", out, str(int(plain_name(good).removeprefix("step-")))]
    return f"Newest good checkpoint: {good}. Go back with `{shlex.join(command)}`, then resume with {advice}"


def _anywhere(bad: Tensor, trainer: Trainer) -> list[float]:
    for axis in (trainer.ctx.tp, trainer.ctx.replicas, trainer.ctx.pp):
        all_reduce(bad, axis)
    return bad.tolist()


def _watch(bad: Tensor, index: int) -> Callable[[nn.Module, object, Tensor], None]:
    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        bad[index] += (~output.detach().isfinite()).sum()

    return hook


def _first(names: list[str], bad: list[float]) -> str | None:
    return next((name for name, count in zip(names, bad, strict=True) if count), None)
