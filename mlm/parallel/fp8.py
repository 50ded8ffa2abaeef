"""Matrix products of linear layers in 8-bit floats, without autograd: x W^T + b and its two gradients.

Weights and activations are cast to E4M3 (three bits of mantissa), gradients to E5M2 (two), each with one
scale that puts its largest magnitude at the format's largest number (arXiv:2209.05433, section 3). Scales are
computed from the operand itself, not from earlier steps, so there is no state. Sums are float32; forward
products on a GPU use the tensor cores' faster sums, of fewer bits.

Tensor cores read both operands along the summed dimension, so a tensor of two products is cast in rows and in
columns at once (`Operand`): backward saves x in 8 bits, and weights are cast once a step.

Shapes: R rows (tokens), x [R, I], weight [O, I], y [R, O]; products whose sizes are not multiples of 16, as
tensor cores require, stay in the dtype of their operands.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mlm.parallel import matmul

NARROW, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
TINY = 1e-12
"""Smallest magnitude for a scale, so that zeros stay zeros."""


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast `x` to an 8-bit format; return it and its float32 scale [].

    Rounded once: a scale of one dimension makes the quotient float32 for bfloat16 x.
    """
    scale = x.abs().amax().float().clamp(min=TINY) / torch.finfo(dtype).max
    return (x / scale.view(1)).to(dtype), scale


class Operand(NamedTuple):
    """A matrix in an 8-bit format, for products with it and with its transpose."""

    rows: Tensor
    """[R, C]."""
    columns: Tensor
    """[C, R]: its transpose, contiguous."""
    scale: Tensor
    """[] float32: factor of its values."""


def cast(x: Tensor, dtype: torch.dtype) -> Operand:
    """Cast `x` [R, C] as `quantize`; by Triton in one pass after a pass for the maximum."""
    kernels = None if torch.compiler.is_compiling() else matmul.kernels_for(x)
    if kernels is not None:
        return Operand(*kernels.cast_both(x, dtype, TINY))
    rows, scale = quantize(x, dtype)
    rows = rows.contiguous()
    return Operand(rows, rows.t().contiguous(), scale)


def multiply(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
) -> Tensor:
    """Product a b^T of 8-bit matrices: [M, K], [N, K] -> [M, N]. `fast` sums with fewer bits on a GPU."""
    return torch._scaled_mm(
        a, b.t(), *scales, bias=bias, out_dtype=out_dtype, use_fast_accum=fast and a.is_cuda
    )


def _cast_and_multiply(
    a: Tensor,
    b: Tensor,
    formats: tuple[torch.dtype, torch.dtype],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    cast_b: tuple[Tensor, Tensor] | None = None,
    fast: bool = False,
) -> Tensor:
    (a8, a_scale), (b8, b_scale) = quantize(a, formats[0]), cast_b or quantize(b, formats[1])
    return multiply(a8.contiguous(), b8.contiguous(), (a_scale, b_scale), out_dtype, bias, fast=fast)


def fits(*sizes: int) -> bool:
    """True if tensor cores take products of these sizes."""
    return all(size > 0 and size % 16 == 0 for size in sizes)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, weight_8: Operand | None = None) -> Tensor:
    """Return x @ weight^T + bias: [..., I], [O, I] -> [..., O]. `weight_8` is the weight, cast before."""
    rows = x.reshape(-1, x.shape[-1])
    if not fits(*rows.shape, weight.shape[0]):
        return matmul.product(x, weight, bias)
    cast_weight = None if weight_8 is None else (weight_8.rows, weight_8.scale)
    y = _cast_and_multiply(rows, weight, (NARROW, NARROW), x.dtype, bias, cast_b=cast_weight, fast=True)
    return y.view(*x.shape[:-1], -1)


def input_gradient(dy: Tensor, weight: Tensor, weight_8: Operand | None = None) -> Tensor:
    """Return dy @ weight: [..., O], [O, I] -> [..., I]. `weight_8` is the weight, cast before."""
    rows = dy.reshape(-1, dy.shape[-1])
    if not fits(*rows.shape, weight.shape[1]):
        return matmul.product(dy, weight.t())
    cast_weight = None if weight_8 is None else (weight_8.columns, weight_8.scale)
    dx = _cast_and_multiply(rows, weight.t(), (WIDE, NARROW), dy.dtype, cast_b=cast_weight)
    return dx.view(*dy.shape[:-1], -1)


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dy^T @ x in `dtype`: [R, O], [R, I] -> [O, I]."""
    if not fits(*dy.shape, x.shape[1]):
        return matmul.weight_gradient(dy, x, dtype)
    return _cast_and_multiply(dy.t(), x.t(), (WIDE, NARROW), dtype)
