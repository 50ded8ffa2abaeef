"""Global gradient norm and clipping, each parameter counted exactly once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlm.parallel.collectives import all_reduce
from mlm.parallel.exact_gradients import gradient_square
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import ParameterShard

PIECE = 1024
"""Elements whose squares are added in float32 on a CPU: its kernel adds a row in one long chain, 3e-5 off for
2M elements, and more for more; its float64 one first makes a copy of twice the size."""
SMALL = 1 << 16
"""Elements below which gradients are copied into one tensor: a call costs more than their squares."""


@torch.no_grad()
def gradient_norm(shards: Sequence[ParameterShard], ctx: ParallelContext, prefix: str = "") -> Tensor:
    """L2 norm of the model's gradient, equal on all ranks; 0-d, not read back from the device.

    `shards` are all of this rank's; only names that begin with `prefix` count, possibly none here. Split
    parameters count on every tp rank, replicated ones on the first, tied copies nowhere. Gradients are
    already summed over dp and cp. Non-finite gradients make the norm non-finite.
    """
    dtype = torch.float64 if shards[0].parameter.dtype == torch.float64 else torch.float32
    if ctx.tp.exact_parts:
        return gradient_square([s for s in shards if s.name.startswith(prefix)], ctx).sqrt().to(dtype)
    # equal on all ranks of a stage: each replica counts everything, or each element has one owner
    spans = any(s.dp_slice is not None or s.replica_axis(ctx.replicas) is not ctx.replicas for s in shards)
    named = [s for s in shards if s.is_owner and s.name.startswith(prefix)]
    named = [s for s in named if not spans or s.is_stored(ctx.replicas)]
    owned = [s.parameter.grad for s in named if s.parameter.grad is not None]
    square = sum_of_squares(owned, shards[0].parameter.device).to(dtype)
    if spans:
        all_reduce(square, ctx.replicas)
    return all_reduce(all_reduce(square, ctx.tp), ctx.pp).sqrt()


@torch.no_grad()
def sum_of_squares(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements, 0-d float64 on their device."""
    grads = [grad for grad in grads if grad.numel()]  # a dp rank may hold no rows
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cpu":
        small = [grad.reshape(-1) for grad in grads if grad.numel() < SMALL]
        flat = [grad.reshape(-1) for grad in grads if grad.numel() >= SMALL]
        norms = list[Tensor]()
        for values in [*flat, torch.cat(small)] if small else flat:
            full = len(values) // PIECE * PIECE
            norms.append(torch.linalg.vector_norm(values[:full].view(-1, PIECE), dim=1))
            if full < len(values):
                norms.append(torch.linalg.vector_norm(values[full:]))
    else:
        norms = torch._foreach_norm(grads, 2)  # type: ignore[assignment]
    return torch.cat([norm.view(-1) for norm in norms]).double().square().sum()


@torch.no_grad()
def scale_gradients(shards: Sequence[ParameterShard], factor: Tensor) -> None:
    """Multiply every gradient by a 0-d tensor, in one fused pass."""
    grads = [s.parameter.grad for s in shards if s.parameter.grad is not None]
    if grads:  # none in a pipeline stage without adapters
        torch._foreach_mul_(grads, factor)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients of this norm; 1 when max_norm is 0 (clipping off)."""
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
