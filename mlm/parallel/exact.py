"""Sums in one order at every layout: training whose bits no degree of tp, pp, dp or zero changes (exact=8).

A layout changes nothing but the order of sums. Here each sum over what a layout may split is a binary tree of
`parts` terms, a power of two that tp and dp divide. A rank of t holds parts / t neighbouring terms: it adds
its subtree, and the upper levels are sums of two ranks (`sum_over_ranks`), whose order does not matter. Each
term comes from a call with the same shapes at every layout: a product of a layer is `parts` products, so that
a library's choice of kernel cannot depend on the degree.

Between the two layers of a split region activations are tuples of parts.

Shapes: x [S, B, I] or [S/t, B, I], weight [O, I] or a rank's share, t = tensor-parallel size, n = parts / t.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.parallel.collectives import (
    all_reduce,
    gather_rows,
    reduce_scatter,
    start_receive,
    start_send,
)
from mlm.parallel.compute_state import ComputeState, DeferredWeightGrads, choose_copy
from mlm.parallel.matmul import product, weight_gradient
from mlm.parallel.mesh import Axis

ROWS = 2048
"""Rows of one product that sums over rows: of 8,192 in bfloat16 oneDNN splits the sum among four threads."""


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of terms as a binary tree of neighbours. Overwrites them."""
    while len(terms) > 1:
        terms = [a.add_(b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def sum_over_ranks(x: Tensor, axis: Axis, *, nearest_first: bool = True) -> Tensor:
    """Sum `x` over an axis in place by a tree, a level of pairs of ranks at a time; the sum on all of them.

    The first level pairs neighbours, or with `nearest_first=False` ranks half the axis apart.
    """
    if axis.size <= 2:
        return all_reduce(x, axis)
    distances = [1 << level for level in range(axis.size.bit_length() - 1)]
    for distance in distances if nearest_first else reversed(distances):
        x.add_(_exchanged(x, axis, axis.rank ^ distance))
    return x


def scatter_over_ranks(x: Tensor, axis: Axis) -> Tensor:
    """The rows of this rank of `sum_over_ranks`: [n, …] -> [n/size, …]. Overwrites `x`."""
    if axis.size <= 2:
        return reduce_scatter(x, axis)
    return sum_over_ranks(x, axis).chunk(axis.size)[axis.rank]


def _exchanged(x: Tensor, axis: Axis, peer: int) -> Tensor:
    """Exchange tensors of one shape with rank `peer` of the axis: send `x`, return the peer's."""
    x = x.contiguous()
    received = torch.empty_like(x)
    receiving, sending = start_receive(received, axis, peer), start_send(x, axis, peer)
    receiving.wait()
    sending.wait()
    return received


@dataclass(frozen=True)
class Region:
    """The ranks over which layers are split, and whether each holds a part of the sequence between layers.

    Of the parts of a sequence over cp each is computed on its own; their terms of a weight's gradient are
    neighbours in a tree, whose upper levels are added for each micro-batch (exact_gradients.py).
    """

    tp: Axis
    sequence_parallel: bool
    cp: Axis = field(default_factory=lambda: Axis("cp"))

    @property
    def terms(self) -> int:
        """Parts of this rank, n."""
        return self.tp.parts // self.tp.size

    def split_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """Parts of the sequence that this rank has rows of; of a single row, as a pooler's, that."""
        parts = self.terms if self.sequence_parallel else self.tp.parts
        return x.chunk(math.gcd(parts * self.cp.parts // self.cp.size, len(x)))

    @property
    def everywhere(self) -> "Region":
        """The region for rows that all tp ranks hold."""
        return replace(self, sequence_parallel=False)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x weight^T + bias, a part of the sequence over cp at a time: [S/c, …, O]."""
        parts = [product(part, weight, bias) for part in x.chunk(self.cp.parts // self.cp.size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def weight_gradient(self, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        """dy^T @ x summed over this rank's rows, a part of the sequence over cp at a time: -> [O, I]."""
        parts = zip(*(t.chunk(self.cp.parts // self.cp.size) for t in (dy, x)), strict=True)
        return tree_sum([weight_gradient_of_rows(d, rows, dtype) for d, rows in parts])

    def add_rows(self, terms: Sequence[Tensor]) -> Tensor:
        """Sum terms of parts of the sequence, of all ranks with sequence parallelism. Overwrites them."""
        total = tree_sum(terms)
        return sum_over_ranks(total, self.tp) if self.sequence_parallel else total

    def gather(self, x: Tensor) -> Tensor:
        return gather_rows(x, self.tp) if self.sequence_parallel else x

    def reduce(self, x: Tensor) -> Tensor:
        """Sum this rank's subtree over tp: [S, …] -> [S, …], or this rank's rows of it. Overwrites `x`."""
        return (scatter_over_ranks if self.sequence_parallel else sum_over_ranks)(x, self.tp)

    def sum_rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum over sequence and samples, of all ranks' rows with sequence parallelism: [S, B, F] -> [F].

        The tree is one of parts of the sequence, and in them of neighbouring rows.
        """
        rows = x.to(dtype).reshape(len(self.split_rows(x)), -1, x.shape[-1])
        return self.add_rows(sum_of_rows(rows).unbind())

    def sum_heads(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum over the heads of all ranks' parts, sequence and samples: [S, B, heads, D] -> [D]."""
        parts = x.chunk(self.terms, 2)
        return sum_over_ranks(tree_sum([self.everywhere.sum_rows(part, dtype) for part in parts]), self.tp)


def sum_of_rows(x: Tensor) -> Tensor:
    """Sum by a tree of neighbouring rows: [..., R, F] -> [..., F]."""
    while (count := x.shape[-2]) > 1:
        even = count // 2 * 2
        pairs = x[..., 0:even:2, :] + x[..., 1:even:2, :]
        x = pairs if even == count else torch.cat([pairs, x[..., even:, :]], -2)
    return x[..., 0, :].clone()


def weight_gradient_of_rows(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy^T @ x, by at most ROWS rows at a time: […, O], […, I] -> [O, I]."""
    total: Tensor | None = None
    for dy_rows, rows in zip(dy.flatten(0, -2).split(ROWS), x.flatten(0, -2).split(ROWS), strict=True):
        part = weight_gradient(dy_rows, rows, dtype)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _give_weight_gradient(
    compute: Callable[[], Tensor], weight: Tensor, deferred: DeferredWeightGrads | None
) -> Tensor | None:
    """Return a weight's gradient, or None where a zero-bubble schedule computes it later."""
    if deferred is None or not deferred.open:
        return compute()

    @torch.no_grad()
    def run() -> None:
        torch.autograd.backward(weight, compute())

    deferred.jobs.append(run)
    return None


class ColumnProducts(torch.autograd.Function):
    """x weight^T + bias of a layer split by column, in parts: [S, B, I] -> n of [S, B, O / parts]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: Region, compute: ComputeState
    ) -> tuple[Tensor, ...]:
        kept = choose_copy(compute.weight_copy, weight, x.dtype)
        ctx.save_for_backward(x, kept)
        ctx.region, ctx.leaf, ctx.deferred = region, weight, compute.deferred
        ctx.bias_dtype = None if bias is None else bias.dtype
        full, n = region.gather(x), region.terms
        offsets = [None] * n if bias is None else bias.to(x.dtype).chunk(n)
        weights = kept.to(x.dtype).chunk(n)
        return tuple(region.product(full, w, b) for w, b in zip(weights, offsets, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, kept = ctx.saved_tensors
        region, leaf = ctx.region, ctx.leaf
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        parts = [dy.contiguous() for dy in gradients]
        dx = dw = db = None
        if needs_x:
            weights = kept.to(x.dtype).chunk(region.terms)
            terms = [region.product(dy, w.t()) for dy, w in zip(parts, weights, strict=True)]
            dx = region.reduce(tree_sum(terms))
        if needs_weight:

            def gradient() -> Tensor:
                full = region.gather(x)
                return torch.cat([region.weight_gradient(dy, full, leaf.dtype) for dy in parts])

            dw = _give_weight_gradient(gradient, leaf, ctx.deferred)
        if needs_bias:
            db = torch.cat([region.everywhere.sum_rows(dy, ctx.bias_dtype) for dy in parts])
        return dx, dw, db, None, None


class RowProducts(torch.autograd.Function):
    """Sum over all ranks' parts of x weight^T, and bias: n of [S, B, I / parts] -> [S, B, O]."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, region: Region, compute: ComputeState, *parts: Tensor
    ) -> Tensor:
        parts = tuple(x.contiguous() for x in parts)
        kept = choose_copy(compute.weight_copy, weight, parts[0].dtype)
        ctx.save_for_backward(kept, *parts)
        ctx.region, ctx.leaf, ctx.deferred = region, weight, compute.deferred
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = region.reduce(
            tree_sum([region.product(x, w) for x, w in zip(parts, _columns(kept, parts), strict=True)])
        )
        return y if bias is None else y.add_(bias.to(y.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, *parts = ctx.saved_tensors
        region, leaf = ctx.region, ctx.leaf
        full = region.gather(dy.contiguous())
        dx = [region.product(full, w.t()) for w in _columns(kept, parts)]
        dw = db = None
        if ctx.needs_input_grad[0]:

            def gradient() -> Tensor:
                return torch.cat([region.weight_gradient(full, x, leaf.dtype) for x in parts], 1)

            dw = _give_weight_gradient(gradient, leaf, ctx.deferred)
        if ctx.needs_input_grad[1]:
            db = region.sum_rows(dy, ctx.bias_dtype)
        return dw, db, None, None, *dx


class WholeProducts(torch.autograd.Function):
    """x weight^T + bias of a layer that all ranks hold, in parts of the sequence: [S, …, I] -> [S, …, O]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: Region, compute: ComputeState
    ) -> Tensor:
        kept = choose_copy(compute.weight_copy, weight, x.dtype).to(x.dtype)
        ctx.save_for_backward(x, kept)
        ctx.region, ctx.dtype = region, weight.dtype
        offset = None if bias is None else bias.to(x.dtype)
        return torch.cat([product(rows, kept, offset) for rows in region.split_rows(x)])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, kept = ctx.saved_tensors
        region, dtype = ctx.region, ctx.dtype
        parts = region.split_rows(dy.contiguous())
        dx = torch.cat([product(d, kept.t()) for d in parts]) if ctx.needs_input_grad[0] else None
        dw = db = None
        if ctx.needs_input_grad[1]:
            pairs = zip(parts, region.split_rows(x), strict=True)
            dw = region.add_rows([weight_gradient_of_rows(d, rows, dtype) for d, rows in pairs])
        if ctx.needs_input_grad[2]:
            db = region.sum_rows(dy, dtype)
        return dx, dw, db, None, None


class TableRows(torch.autograd.Function):
    """Rows of a table that all ranks hold: [S, B] int64 -> [S, B, H]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, region: Region) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size, ctx.dtype, ctx.region = len(weight), weight.dtype, region
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), region, sums = ctx.saved_tensors, ctx.region, torch.ops.aten.embedding_dense_backward
        pairs = zip(region.split_rows(dy.to(ctx.dtype)), region.split_rows(rows), strict=True)
        return None, region.add_rows([sums(d, at, ctx.size, -1, False) for d, at in pairs]), None


def _columns(weight: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """The columns of a weight that multiply each part, laid out alike at every tp."""
    return [w.to(parts[0].dtype).contiguous() for w in weight.chunk(len(parts), 1)]


SumRows = Callable[[Tensor, torch.dtype], Tensor]
"""`Region.sum_rows`, or `sum_heads`."""


class Norm(torch.autograd.Function):
    """Layer norm, or RMSNorm without `centers`, whose sums over rows are trees: x [S, B, …, H]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centers: bool, sum_rows: SumRows
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean: Tensor | None = None
        if centers:  # the kernel computes each row for itself
            weight, bias = weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype)
            y, mean, scale = torch.native_layer_norm(wide, x.shape[-1:], weight, bias, eps)
        else:
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            y = wide * scale * weight
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.sum_rows = sum_rows
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        wide, dy = x.to(scale.dtype), dy.to(scale.dtype)
        unit = wide.mul(scale) if mean is None else (wide - mean).mul_(scale)
        if mean is None:
            g = dy * weight
            dx = (g - unit * (g * unit).mean(-1, keepdim=True)).mul_(scale)
        else:
            dx, _, _ = torch.ops.aten.native_layer_norm_backward(
                dy, wide, x.shape[-1:], mean, scale, weight, bias, [True, False, False]
            )
        dw = ctx.sum_rows(unit.mul_(dy), weight.dtype) if ctx.needs_input_grad[1] else None
        db = ctx.sum_rows(dy, bias.dtype) if ctx.needs_input_grad[2] else None
        return dx.to(x.dtype), dw, db, None, None, None


class Lookup(torch.autograd.Function):
    """Rows of this rank's share of the token table, whose gradient is added to a tree of its own.

    Where the output layer is tied to the table, a pipeline adds the two terms of its gradient last: so does
    every layout.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, add: Callable[[Tensor], None], cp: Axis) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size, ctx.dtype, ctx.add, ctx.cp = len(weight), weight.dtype, add, cp
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None, None]:
        # each cp rank adds the rows of all: they are less than a table
        rows, dy = (gather_rows(x, ctx.cp) for x in (*ctx.saved_tensors, dy.to(ctx.dtype)))
        ctx.add(torch.ops.aten.embedding_dense_backward(dy, rows, ctx.size, -1, False))
        return None, None, None, None


class KeepRows(torch.autograd.Function):
    """This rank's rows of what all tp ranks compute alike, `GatherOutputs` backwards: [S, …] -> [S/t, …]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.chunk(tp.size)[tp.rank]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return gather_rows(dy, ctx.tp), None
