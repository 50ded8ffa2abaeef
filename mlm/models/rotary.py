"""Rotary position embedding: queries and keys rotated by angles proportional to their positions.

Source: arXiv:2104.09864, section 3.4. Families choose the frequencies.

Shapes: S sequence, B micro-batch, D head_dim, R rotated dimensions of a head (the first R of D).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """Cosines and sines of the angles of each token."""

    cos: Tensor
    """[S, B or 1, 1, R/2] in the dtype of activations, like `sin`."""
    sin: Tensor
    sliding: "Rotary | None" = None
    """Angles of the layers with a window, where they differ."""

    @classmethod
    def of(cls, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> "Rotary":
        """Tables of positions [S, B or 1]; `frequencies` [R/2] in radians a token, both times `factor`."""
        angles = positions.to(frequencies.dtype)[..., None, None] * frequencies  # [S, B or 1, 1, R/2]
        return cls((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the heads of x, [S, B, heads, D]: dimension i < R/2 together with i + R/2."""
        y: Tensor = _Rotate.apply(x, self.cos, self.sin)  # type: ignore[no-untyped-call]
        return y


class _Rotate(torch.autograd.Function):
    """Keeps only the tables for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, sin, sign=-1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int = 1) -> Tensor:
    """Rotate x [S, B, heads, D] by the angles (sign=1) or back (-1)."""
    half = cos.shape[-1]
    a, b, unrotated = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    if torch.compiler.is_compiling():  # compiles to one kernel
        return torch.cat([a * cos - sign * b * sin, b * cos + sign * a * sin, unrotated], -1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.is_cpu:  # long rows are fast: both halves in one product
        torch.mul(x[..., : 2 * half], torch.cat([cos, cos], -1), out=y[..., : 2 * half])
    else:  # saves the launch that doubles the cosines
        halves, out = (z[..., : 2 * half].unflatten(-1, (2, half)) for z in (x, y))
        torch.mul(halves, cos.unsqueeze(-2), out=out)
    y[..., :half].addcmul_(b, sin, value=-sign)
    y[..., half : 2 * half].addcmul_(a, sin, value=sign)
    y[..., 2 * half :] = unrotated
    return y
