"""Gated MLP, dense or of one expert.

Shapes: S sequence, B micro-batch, F width of the MLP, t = tensor-parallel size.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.models.config import ModelConfig
from mlm.models.llama.settings import LlamaSettings, num_blocks
from mlm.models.transformer import MLP, activate
from mlm.parallel.layers import FusedRows
from mlm.parallel.matmul import kernels_for
from mlm.parallel.mesh import Axis


class GatedMLP(MLP):
    """Gated MLP y = W2 (act(G x) * (U x)) (arXiv:2002.05202): SwiGLU, or GeGLU with model.activation=gelu.

    G and U are in one weight, whose rows are ordered `[block][gate, up][F / blocks]`, with gcd(N, F) blocks:
    a contiguous split at any tp that divides the heads and F gives whole blocks. Columns of W2 are in the
    usual order.
    """

    def __init__(self, config: ModelConfig, *, tp: Axis, sequence_parallel: bool = False) -> None:
        super().__init__(config, tp=tp, sequence_parallel=sequence_parallel)
        self.block = config.ffn_size // num_blocks(config)
        self.up.fused_rows = FusedRows(2, self.block)
        self.clamp = LlamaSettings.of(config).swiglu_clamp

    def inner(self, y: Tensor) -> Tensor:
        """[S, B, 2F/t] -> [S, B, F/t]."""
        return gate(y, self.activation, self.block, clamp=self.clamp)


def gate(
    y: Tensor, activation: str, block: int | None = None, *, clamp: tuple[float, float] | None = None
) -> Tensor:
    """act(gate) * up of rows ordered `[F/t / block][gate, up][block]`: [..., 2F/t] -> [..., F/t].

    `block` None means one block; `clamp` is (limit, alpha) of a clamped SwiGLU.
    """
    pairs = y.unflatten(-1, (-1, 2, block or y.shape[-1] // 2))  # [..., blocks/t, 2, F / blocks]
    fuses = (clamp is not None or activation == "silu") and not torch.compiler.is_compiling()
    if fuses and kernels_for(pairs) is not None:
        gated: Tensor = _Gate.apply(pairs, *((math.inf, 1.0, 0.0) if clamp is None else (*clamp, 1.0)))  # type: ignore[no-untyped-call]
    elif clamp is not None:
        gated = _ClampedSwiGLU.apply(pairs, *clamp)  # type: ignore[no-untyped-call]
    elif activation != "silu":
        gated = activate(pairs[..., 0, :], activation) * pairs[..., 1, :]
    elif torch.compiler.is_compiling():  # decides what to save, and cannot trace results written in parts
        gated = F.silu(pairs[..., 0, :]) * pairs[..., 1, :]
    else:
        gated = _SwiGLU.apply(pairs)  # type: ignore[no-untyped-call]
    return gated.flatten(-2)


class _Gate(torch.autograd.Function):
    """SwiGLU, clamped or not, by Triton in one pass forward and one backward; saves its input."""

    @staticmethod
    def forward(ctx: Any, pairs: Tensor, *numbers: float) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.numbers = numbers
        return kernels_for(pairs).gate(pairs, None, *numbers)  # type: ignore[no-any-return, union-attr]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (pairs,) = ctx.saved_tensors
        return kernels_for(pairs).gate(pairs, dy, *ctx.numbers), None, None, None  # type: ignore[union-attr]


class _ClampedSwiGLU(torch.autograd.Function):
    """(u + 1) g s(alpha g) of [..., 2, F], g = min(gate, limit), -limit <= u <= limit; saves its input."""

    @staticmethod
    def forward(ctx: Any, pairs: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.limit, ctx.alpha = limit, alpha
        g, u = pairs[..., 0, :].clamp(max=limit), pairs[..., 1, :].clamp(-limit, limit)
        return torch.sigmoid(alpha * g).mul_(g).mul_(u.add_(1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (pairs,), limit, alpha = ctx.saved_tensors, ctx.limit, ctx.alpha
        gate, up = pairs.unbind(-2)
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        s = torch.sigmoid(alpha * g)
        slope = s * (1 + alpha * g * (1 - s))
        d_gate = (dy * (u + 1) * slope).masked_fill_(gate > limit, 0)
        d_up = (dy * g * s).masked_fill_(up.abs() > limit, 0)
        return torch.stack([d_gate, d_up], -2), None, None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [..., 2, F]; saves only its input.

    On a CPU the input is copied with all gates first: rows as short as a block take twice as long.
    """

    @staticmethod
    def forward(ctx: Any, pairs: Tensor) -> Tensor:
        halves = pairs.movedim(-2, 0)  # [2, ..., F]
        halves = halves.contiguous() if pairs.is_cpu else halves
        ctx.save_for_backward(halves)
        return F.silu(halves[0]).mul_(halves[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate, up), silu_backward = ctx.saved_tensors[0], torch.ops.aten.silu_backward.grad_input
        d = dy.new_empty((*dy.shape[:-1], 2, dy.shape[-1]))
        if gate.is_cpu:
            part = F.silu(gate).mul_(dy)
            d[..., 1, :] = part
            torch.mul(dy, up, out=part)
            d[..., 0, :] = silu_backward(part, gate, grad_input=part)
        else:
            torch.mul(dy, F.silu(gate), out=d[..., 1, :])
            silu_backward(dy * up, gate, grad_input=d[..., 0, :])
        return d
