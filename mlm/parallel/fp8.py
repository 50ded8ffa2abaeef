"""Matrix products of linear layers in 8-bit floats, without autograd: x W^T + b and its two gradients.

Weights and activations are cast to E4M3 (three bits of mantissa), gradients to E5M2 (two), each with one
scale that puts its largest magnitude at the format's largest number (arXiv:2209.05433, section 3). Scales are
taken from the operand itself, not from earlier steps: nothing has to be kept or restored. Sums are float32.

Shapes: R rows (tokens), x [R, I], weight [O, I], y [R, O]; products whose sizes are not multiples of 16,
which tensor cores want, stay in the dtype of their operands.
"""

import torch
from torch import Tensor

from mlm.parallel import matmul

NARROW, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
TINY = 1e-12
"""Smallest magnitude that a scale is made for: all zeros stay zeros."""


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` in an 8-bit format, and the float32 scale [] that it has to be multiplied with.

    Rounded once: the quotient is float32 where x is bfloat16, as a scale of one dimension makes it.
    """
    scale = x.abs().amax().float().clamp(min=TINY) / torch.finfo(dtype).max
    return (x / scale.view(1)).to(dtype), scale


def _multiply(
    a: Tensor,
    b: Tensor,
    formats: tuple[torch.dtype, torch.dtype],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    (a8, a_scale), (b8, b_scale) = quantize(a, formats[0]), quantize(b, formats[1])
    y: Tensor = torch._scaled_mm(
        a8.contiguous(), b8.contiguous().t(), a_scale, b_scale, bias=bias, out_dtype=out_dtype
    )
    return y


def fits(*sizes: int) -> bool:
    """True if tensor cores take products of these sizes."""
    return all(size > 0 and size % 16 == 0 for size in sizes)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias: [..., I], [O, I] -> [..., O]."""
    rows = x.reshape(-1, x.shape[-1])
    if not fits(*rows.shape, weight.shape[0]):
        return matmul.product(x, weight, bias)
    return _multiply(rows, weight, (NARROW, NARROW), x.dtype, bias).view(*x.shape[:-1], -1)


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """Return dy @ weight: [..., O], [O, I] -> [..., I]."""
    rows = dy.reshape(-1, dy.shape[-1])
    if not fits(*rows.shape, weight.shape[1]):
        return matmul.product(dy, weight.t())
    return _multiply(rows, weight.t(), (WIDE, NARROW), dy.dtype).view(*dy.shape[:-1], -1)


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dy^T @ x in `dtype`: [R, O], [R, I] -> [O, I]."""
    if not fits(*dy.shape, x.shape[1]):
        return matmul.weight_gradient(dy, x, dtype)
    return _multiply(dy.t(), x.t(), (WIDE, NARROW), dtype)
