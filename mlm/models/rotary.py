"""Rotary position embedding: queries and keys turned by angles proportional to their positions.

Source: arXiv:2104.09864, section 3.4. Frequencies are those of a family; here are the tables and the turn.

Shapes: S sequence, B micro-batch, D head_dim, R turned dimensions of a head (the first R of D).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """Cosines and sines of the angles of each token."""

    cos: Tensor
    """[S, B or 1, 1, R/2] in the dtype of activations."""
    sin: Tensor
    """The same."""

    @classmethod
    def of(cls, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> "Rotary":
        """Tables of positions [S, B or 1]; `frequencies` [R/2] in radians a token, both times `factor`."""
        angles = positions.to(frequencies.dtype)[..., None, None] * frequencies  # [S, B or 1, 1, R/2]
        return cls((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))

    def turn(self, x: Tensor) -> Tensor:
        """Turn the heads of x, [S, B, heads, D]: dimension i < R/2 together with i + R/2."""
        y: Tensor = _Turn.apply(x, self.cos, self.sin)  # type: ignore[no-untyped-call]
        return y


class _Turn(torch.autograd.Function):
    """Nothing is kept for backward but the tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(dy, cos, sin, sign=-1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int = 1) -> Tensor:
    """Turn x [S, B, heads, D] forth (sign=1) or back (-1)."""
    half = cos.shape[-1]
    if torch.compiler.is_compiling():  # one kernel, which writes its result once
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - sign * b * sin, b * cos + sign * a * sin, rest], -1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    a, b = x[..., :half], x[..., half : 2 * half]
    torch.mul(x[..., : 2 * half], torch.cat([cos, cos], -1), out=y[..., : 2 * half])  # rows as long as may be
    y[..., :half].addcmul_(b, sin, value=-sign)
    y[..., half : 2 * half].addcmul_(a, sin, value=sign)
    if x.shape[-1] > 2 * half:
        y[..., 2 * half :] = x[..., 2 * half :]
    return y
