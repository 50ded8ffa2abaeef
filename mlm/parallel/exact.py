"""Sums in one order at every layout: training is bit-equal at any tp, pp, dp and zero (exact=8).

A layout changes only the order of sums. Here each sum over a dimension that a layout may split is a binary
tree of `parts` terms, a power of two that tp and dp divide. A rank of t holds parts / t neighbouring terms:
it adds its subtree, and the upper levels are added over ranks (`sum_over_ranks`). Each term comes from a call
with the same shapes at every layout: a layer is `parts` products, so that a library's choice of kernel cannot
depend on the degree.

Between the two layers of a split region activations are tuples of parts.

Shapes: x [S, B, I] or [S/t, B, I], weight [O, I] or a rank's share, t = tensor-parallel size, n = parts / t.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.parallel.collectives import all_reduce, all_to_all, gather_rows, reduce_scatter
from mlm.parallel.compute_state import ComputeState, choose_copy
from mlm.parallel.matmul import NEW_SHAPE_FLOPS, GroupedRows, grouped_product, product, weight_gradient
from mlm.parallel.mesh import Axis

T = TypeVar("T")
ROWS = 2048
"""Rows of one product that sums over rows: oneDNN splits 8,192 bfloat16 rows among four threads."""


class TreeSum:
    """Incremental sum of 2^k leaves by a binary tree of neighbours; keeps log2(leaves) + 1 tensors."""

    def __init__(self, leaf: int = 1) -> None:
        self.leaf = leaf
        """Terms of a leaf, added one after another."""
        self.count = 0
        self.sums: list[Tensor] = []
        """Sums of subtrees, the largest first, and of the incomplete leaf."""

    def add(self, x: Tensor) -> None:
        """Add the next term; the tree may keep and overwrite it."""
        if self.count % self.leaf:
            self.sums[-1].add_(x)
        else:
            self.sums.append(x)
        self.count += 1
        leaves, remainder = divmod(self.count, self.leaf)
        while not remainder and leaves % 2 == 0:
            last, leaves = self.sums.pop(), leaves // 2
            self.sums[-1].add_(last)

    def take(self) -> Tensor:
        assert len(self.sums) == 1, "the leaves are a power of two"
        return self.sums.pop()


def tree_sum(terms: Iterable[Tensor], leaf: int = 1) -> Tensor:
    """Return the sum of 2^k leaves of `leaf` terms each. Overwrites them."""
    tree = TreeSum(leaf)
    for term in terms:
        tree.add(term)
    return tree.take()


def farthest_first(terms: Sequence[T]) -> Sequence[T]:
    """Order 2^k terms so that a tree of neighbours first adds terms at half the total distance."""
    return terms if len(terms) <= 2 else [*farthest_first(terms[::2]), *farthest_first(terms[1::2])]


def scatter_over_ranks(x: Tensor, axis: Axis, *, nearest_first: bool = True) -> Tensor:
    """This rank's rows of the `tree_sum` of all ranks' tensors: [n, …] -> [n/size, …]."""
    if axis.size <= 2:
        return reduce_scatter(x, axis)
    rows = [len(x) // axis.size] * axis.size
    terms = all_to_all(x, axis, rows, rows).chunk(axis.size)
    return tree_sum(terms if nearest_first else farthest_first(terms))


def sum_over_ranks(x: Tensor, axis: Axis, *, nearest_first: bool = True) -> Tensor:
    """`tree_sum` of the tensors of all ranks of an axis, on every rank. May overwrite `x`."""
    if not x.numel():  # an expert without rows
        return x
    if axis.size <= 2:
        return all_reduce(x, axis)
    padded = F.pad(x.flatten(), (0, -x.numel() % axis.size))
    shares = gather_rows(scatter_over_ranks(padded, axis, nearest_first=nearest_first), axis)
    return shares[: x.numel()].view_as(x)


def sum_of_rows(x: Tensor) -> Tensor:
    """Sum by a tree of neighbouring rows: [..., R, F] -> [..., F]."""
    while (count := x.shape[-2]) > 1:
        even = count // 2 * 2
        pairs = x[..., 0:even:2, :] + x[..., 1:even:2, :]
        x = pairs if even == count else torch.cat([pairs, x[..., even:, :]], -2)
    return x[..., 0, :].clone()


def weight_gradient_of_rows(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy^T @ x, by at most ROWS rows at a time: […, O], […, I] -> [O, I]."""
    parts = list(zip(dy.flatten(0, -2).split(ROWS), x.flatten(0, -2).split(ROWS), strict=True))
    return tree_sum((weight_gradient(*part, dtype) for part in parts), leaf=len(parts))


@dataclass(frozen=True)
class ExactRegion:
    """Ranks that split layers, and whether each holds a part of the sequence between layers.

    Each part of a sequence over cp is computed separately; their terms of a weight's gradient are neighbours
    in a tree, whose upper levels are added for each micro-batch (exact_gradients.py).
    """

    tp: Axis
    sequence_parallel: bool
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    compute: ComputeState = field(default_factory=ComputeState)
    """State of the layer: weight copy and deferred weight gradients."""
    is_split: bool = True
    """True for layers that tp splits, which see all rows. False for replicated weights: one term, with a
    product for each part of the sequence, or of the rank's rows with sequence parallelism."""
    rows_vary: bool = False
    """True for experts: oneDNN compiles a kernel for each number of rows."""

    @property
    def unsplit(self) -> "ExactRegion":
        return replace(self, is_split=False)

    @property
    def terms(self) -> int:
        """Parts of this rank, n."""
        return self.tp.parts // self.tp.size if self.is_split else 1

    def gather(self, x: Tensor) -> Tensor:
        return gather_rows(x, self.tp) if self.is_split and self.sequence_parallel else x

    def reduce(self, x: Tensor) -> Tensor:
        """Sum this rank's subtree over tp: [S, …] -> [S, …], or this rank's rows. May overwrite `x`."""
        if not self.is_split:
            return x
        return (scatter_over_ranks if self.sequence_parallel else sum_over_ranks)(x, self.tp)

    def blocks(self, x: Tensor) -> Sequence[Tensor]:
        """The rows of each product."""
        parts = self.cp.parts // self.cp.size
        if not self.is_split:
            parts *= self.tp.parts // (self.tp.size if self.sequence_parallel else 1)
            parts = math.gcd(parts, len(x))  # a pooler's single row is one block
        return x.chunk(parts)

    def add_blocks(self, terms: Iterable[Tensor]) -> Tensor:
        """Sum the terms of all blocks, on all ranks with different rows. Overwrites them."""
        total = tree_sum(terms)
        is_partial = self.sequence_parallel and not self.is_split
        return sum_over_ranks(total, self.tp) if is_partial else total

    def products(self, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        """Sum of x weight^T + bias over 2^k pairs: each [S/c, …, I], [O, I] -> [S/c, …, O]."""
        if self.rows_vary:
            runs = GroupedRows((len(xs[0]),))
            return tree_sum(grouped_product(x, w[None], runs) for x, w in zip(xs, weights, strict=True))
        # a block's terms are added while in the cache
        sums = [
            tree_sum(product(x, w, bias) for x, w in zip(block, weights, strict=True))
            for block in zip(*map(self.blocks, xs), strict=True)
        ]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dy^T x summed over rows: of the shape and dtype of `weight`."""
        if self.rows_vary and dy.dtype == weight.dtype and 2 * dy.numel() * x.shape[1] < NEW_SHAPE_FLOPS:
            return torch.mm(dy.t(), x).view(weight.shape)
        pairs = zip(self.blocks(dy), self.blocks(x), strict=True)
        total = self.add_blocks(weight_gradient_of_rows(*pair, weight.dtype) for pair in pairs)
        return total.view(weight.shape)

    def sum_rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum over sequence and samples, in each block by a tree of neighbouring rows: [S, B, F] -> [F]."""
        rows = x.to(dtype).reshape(len(self.blocks(x)), -1, x.shape[-1])
        return self.add_blocks(sum_of_rows(rows).unbind())

    def sum_heads(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum over all ranks' heads and this rank's tokens: [S, B, heads, D] -> [D].

        Heads are added first, for one part of the sequence over cp at a time; parts of other ranks come last.
        """
        rows = self.cp.parts // self.cp.size, -1, x.shape[-1]
        terms = [sum_of_rows(part.to(dtype).reshape(rows)) for part in x.chunk(self.terms, 2)]
        return tree_sum(sum_over_ranks(tree_sum(terms), self.tp).unbind())


class Products(torch.autograd.Function):
    """x weight^T + bias in parts, one product each.

    By column: x [S, B, I] -> n of [S, B, O / parts]. By row: n of [S, B, I / parts] -> the sum over all parts
    of all ranks, [S, B, O], without a bias.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, region: ExactRegion, by_row: bool, *xs: Tensor
    ) -> Any:
        xs = tuple(x.contiguous() for x in xs)
        n, dtype = region.terms, xs[0].dtype
        stored = choose_copy(region.compute.weight_copy, weight, dtype)
        ctx.save_for_backward(stored, *xs)
        ctx.region, ctx.by_row, ctx.leaf = region, by_row, weight
        weights = _slices(stored, n, by_row, dtype)
        if by_row:
            return region.reduce(region.products(xs, weights))
        x, biases = region.gather(xs[0]), [None] * n if bias is None else bias.to(dtype).chunk(n)
        return tuple(region.products([x], [w], b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stored, *xs = ctx.saved_tensors
        region, by_row, leaf, n = ctx.region, ctx.by_row, ctx.leaf, ctx.region.terms
        dys = [dy.contiguous() for dy in gradients]
        db = None
        if ctx.needs_input_grad[1]:
            db = torch.cat([region.sum_rows(dy, leaf.dtype) for dy in dys])
        if by_row:
            dys = [region.gather(dys[0])] * n
        dxs: list[Tensor | None] = [None] * len(xs)
        if any(ctx.needs_input_grad[4:]):
            weights = [w.t() for w in _slices(stored, n, by_row, xs[0].dtype)]
            if by_row:
                dxs = [region.products([dy], [w]) for dy, w in zip(dys, weights, strict=True)]
            else:
                dxs = [region.reduce(region.products(dys, weights))]

        def gradient() -> Tensor:
            inputs, slices = xs if by_row else [region.gather(xs[0])] * n, leaf.chunk(n, -1 if by_row else -2)
            parts = [region.weight_gradient(*part) for part in zip(dys, inputs, slices, strict=True)]
            return parts[0] if n == 1 else torch.cat(parts, -1 if by_row else -2)

        @torch.no_grad()
        def run() -> None:
            torch.autograd.backward(leaf, gradient())

        deferred, dw = region.compute.deferred, None
        if ctx.needs_input_grad[0] and deferred is not None and deferred.open:
            deferred.jobs.append(run)
        elif ctx.needs_input_grad[0]:
            dw = gradient()
        return dw, db, None, None, *dxs


def _slices(weight: Tensor, n: int, by_row: bool, dtype: torch.dtype) -> list[Tensor]:
    """Contiguous weight of each part, [O, I], from [O, I] or an expert's [2, F, I]."""
    return [w.to(dtype).contiguous().flatten(0, -2) for w in weight.chunk(n, -1 if by_row else -2)]


class WithGradient(torch.autograd.Function):
    """Return y, computed from x without autograd; the gradient of x is `gradient(dy)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gradient: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.gradient = gradient
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.gradient(dy), None, None
