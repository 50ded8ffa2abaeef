"""Global gradient norm and clipping, each parameter counted exactly once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlm.parallel.collectives import all_reduce
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import ParameterShard


@torch.no_grad()
def gradient_norm(shards: Sequence[ParameterShard], ctx: ParallelContext) -> Tensor:
    """L2 norm of the whole model's gradient, equal on all ranks; 0-d, not read back from the device.

    Split parameters count on every tp rank, replicated ones on the first alone, tied copies nowhere.
    Gradients are already summed over dp, each dp rank holding all of them or, sharded over dp, its rows.
    Non-finite gradients make it non-finite.
    """
    owned = [s.parameter.grad for s in shards if s.is_owner and s.parameter.grad is not None]
    grads = [grad for grad in owned if grad.numel()]  # of few rows a dp rank may hold none
    first = shards[0].parameter
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    square = torch.zeros((), dtype=dtype, device=first.device)
    if grads:
        # the CPU's float32 kernel adds in one long chain: 3e-5 off for 2M elements, and more for more
        wide = torch.float64 if first.device.type == "cpu" else None
        square += torch.stack(torch._foreach_norm(grads, 2, dtype=wide)).square().sum()
    if any(s.dp_slice is not None for s in shards):  # alike on all ranks
        all_reduce(square, ctx.dp)
    return all_reduce(all_reduce(square, ctx.tp), ctx.pp).sqrt()


@torch.no_grad()
def scale_gradients(shards: Sequence[ParameterShard], factor: Tensor) -> None:
    """Multiply every gradient by a 0-d tensor, in one fused pass."""
    grads = [s.parameter.grad for s in shards if s.parameter.grad is not None]
    torch._foreach_mul_(grads, factor)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients of this norm; 1 when max_norm is 0 (clipping off)."""
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
