"""f and g of Megatron-LM: the only communication inside a tensor-parallel layer.

Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3. f = `copy_to_tp` is the identity forward and an
all-reduce backward; g = `reduce_from_tp` is its conjugate. On an axis of one rank both are nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlm.parallel.mesh import Axis

_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name since torch 2.13, and the one before."""


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `x` over the axis in place and return it."""
    if axis.group is not None:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[…] of each rank -> [size, …] in rank order, on every rank."""
    out = x.new_empty((axis.size, *x.shape))
    if axis.group is None:
        return out.copy_(x)
    _gather_flat(out.view(-1), x.contiguous().view(-1), group=axis.group)
    return out


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        # autograd may hand the same tensor to another branch, so it is reduced in a copy of its own
        return all_reduce(dy.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.detach(), axis)  # the partial sums are ours alone: summed where they are

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def copy_to_tp(x: Tensor, axis: Axis) -> Tensor:
    """f: enter a region where each tp rank holds its share of a layer. Gradients are summed over tp."""
    return x if axis.size == 1 else _CopyToTP.apply(x, axis)


def reduce_from_tp(x: Tensor, axis: Axis) -> Tensor:
    """g: leave that region. Sums the partial results over tp, in place; gradients pass unchanged.

    `x` must be contiguous and needed by nobody else in its partial form.
    """
    return x if axis.size == 1 else _ReduceFromTP.apply(x, axis)
