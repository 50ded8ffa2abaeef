"""Where numbers stop being finite: a second look at the step that failed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mlm.data.sampler import Batch
from mlm.parallel.collectives import all_reduce
from mlm.train.trainer import Trainer


def first_non_finite(trainer: Trainer, batches: list[Batch]) -> str:
    """A sentence that names the first non-finite place of a step on these micro-batches.

    Forward order for activations; if all are finite, backward order for gradients. Collective over all
    ranks, and the same sentence on every one: a place counts if it is non-finite anywhere.
    """
    names = [name for name, module in trainer.model.named_modules() if name and not list(module.children())]
    bad = torch.zeros(len(names), device=trainer.ctx.device)
    handles = [
        trainer.model.get_submodule(name).register_forward_hook(_watch(bad, i))
        for i, name in enumerate(names)
    ]
    try:
        trainer.forward_backward(batches)
    finally:
        for handle in handles:
            handle.remove()
    for axis in (trainer.ctx.tp, trainer.ctx.dp):
        all_reduce(bad, axis)
    where = _in_forward_order(names, bad.tolist())
    if where is not None:
        return f"the first non-finite activation is the output of {where}"
    for shard in reversed(trainer.shards):
        grad = shard.parameter.grad
        count = torch.zeros((), device=trainer.ctx.device)
        if grad is not None:
            count += (~grad.isfinite()).sum()
        for axis in (trainer.ctx.tp, trainer.ctx.dp):
            all_reduce(count, axis)
        if count.item():
            return f"activations are finite; the first non-finite gradient is that of {shard.name}"
    return "all activations and gradients of this step are finite when it is repeated"


def _watch(bad: Tensor, index: int) -> Callable[[nn.Module, object, Tensor], None]:
    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        bad[index] += (~output.detach().isfinite()).sum()

    return hook


def _in_forward_order(names: list[str], bad: list[float]) -> str | None:
    # modules are defined in the order they run, so the first in the list is the first that failed
    return next((name for name, count in zip(names, bad, strict=True) if count), None)
