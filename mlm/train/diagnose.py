"""Search for the first non-finite numbers: a replay of the step that failed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mlm.errors import UserError
from mlm.parallel.collectives import all_reduce
from mlm.train.trainer import Trainer


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
    return "all activations and gradients of this step are finite when it is repeated"


def refuse_exhausted(trainer: Trainer, batches: list[Any], warmup: str) -> None:
    """Abort, with a diagnosis, a run that cannot be helped; `warmup` is its setting of the warm-up.

    Collective over all ranks, and the same verdict on every one. Raises UserError.
    """
    scaler, precision = trainer.scaler, trainer.config.precision
    if not scaler.exhausted.item():
        return
    where = first_non_finite(trainer, batches)
    cause = (
        f"gradients still overflow at precision.min_loss_scale={precision.min_loss_scale:g}"
        if scaler.dynamic
        else f"gradients are not finite in precision={precision.dtype}"
    )
    raise UserError(
        f"step {trainer.step}: {cause}; {where}. Lower optimizer.lr, raise {warmup} or "
        "use precision=bf16 or fp32; the bad steps touched no weight and the last checkpoint is intact"
    )


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
