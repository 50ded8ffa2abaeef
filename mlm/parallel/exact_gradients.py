"""Gradients summed over micro-batches and replicas in one order, and their norm (exact.py)."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlm.parallel.collectives import all_reduce
from mlm.parallel.exact import sum_over_ranks
from mlm.parallel.expert.experts import Experts
from mlm.parallel.gradients import build_reducer
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import ParameterShard, parameters_by_axis

if TYPE_CHECKING:
    from mlm.parallel.sharded import ShardedReducer

FIXED_POINT = 2.0**38
"""Units of the largest square in the sum of all squares: 2^24 of them fit into an int64."""


class GradientTree:
    """Sum of a gradient over the micro-batches of a rank.

    Those of a leaf are added as they come; leaves in a binary tree, of which log2(leaves) + 1 terms are held.
    """

    def __init__(self, leaf: int = 1) -> None:
        self.leaf = leaf
        """Micro-batches of a leaf."""
        self.open: Tensor | None = None
        self.count = 0
        self.closed: list[tuple[int, Tensor]] = []
        """Subtrees, each with its height."""

    def add(self, x: Tensor) -> None:
        """Add the next micro-batch's; the tree may keep it."""
        self.open = x if self.open is None else self.open.add_(x)
        self.count += 1
        if self.count % self.leaf == 0:
            height, total, self.open = 0, self.open, None
            while self.closed and self.closed[-1][0] == height:
                height, total = height + 1, self.closed.pop()[1].add_(total)
            self.closed.append((height, total))

    def take(self) -> Tensor | None:
        """Return the sum and begin the next; None if nothing was added."""
        closed, self.closed, self.count = self.closed, [], 0
        assert self.open is None
        assert len(closed) <= 1, "the leaves of a rank are a power of two"
        return closed[0][1] if closed else None

    def total(self) -> Tensor:
        """As `take`, of one term or more."""
        total = self.take()
        assert total is not None
        return total


def sum_of_sources(terms: Sequence[Tensor]) -> Tensor:
    """Sum what neighbouring ranks of dp gave in the order of `leaf_order`'s last levels. Overwrites it."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a.add_(b) for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def tree_of_leaves(terms: Iterable[Tensor], leaf: int) -> Tensor:
    """Sum numbers of a rank's micro-batches as their gradients. Overwrites them."""
    tree = GradientTree(leaf)
    for term in terms:
        tree.add(term)
    return tree.total()


def leaf_order(micro_batches: int, dp: Axis) -> tuple[list[int], int]:
    """The order in which a rank runs its micro-batches, and how many make a leaf.

    Micro-batch i of rank r is number i * dp + r of the step, in leaf (i * dp + r) modulo leaves. A level of
    the tree adds leaves whose numbers differ in one bit, the highest first: any dp ranks hold subtrees.
    """
    leaves = math.gcd(micro_batches * dp.size, dp.parts) // dp.size
    bits = range(leaves.bit_length() - 1)
    reverse = [sum((leaf >> bit & 1) << (len(bits) - 1 - bit) for bit in bits) for leaf in range(leaves)]
    order = sorted(range(micro_batches), key=lambda i: (reverse[i % leaves], i // leaves))
    return order, micro_batches // leaves


@torch.no_grad()
def gradient_square(shards: Sequence[ParameterShard], ctx: ParallelContext) -> Tensor:
    """Square of the gradient's norm, 0-d float64, the same at every layout.

    Of each row and each part of its columns the squares are added; those sums are then whole numbers of
    units, whose order does not matter.
    """
    device, axes = shards[0].parameter.device, (ctx.tp, ctx.pp, ctx.replicas)
    sums = [
        _squares(s.parameter.grad, ctx.tp.parts, s)
        for s in shards
        if s.is_stored(ctx.replicas) and s.parameter.grad is not None and s.parameter.grad.numel()
    ]
    squares = torch.cat(sums) if sums else torch.zeros(1, dtype=torch.float64, device=device)
    largest = squares.max().nan_to_num(nan=torch.inf)
    for axis in axes:
        all_reduce(largest, axis, dist.ReduceOp.MAX)
    unit = largest.clamp(min=torch.finfo(torch.float64).tiny) / FIXED_POINT
    total = (squares / unit).nan_to_num(0.0, 0.0, 0.0).round_().long().sum()
    for axis in axes:
        all_reduce(total, axis)
    return torch.where(largest.isfinite(), total.double() * unit, largest)


def _squares(gradient: Tensor, parts: int, shard: ParameterShard) -> Tensor:
    """Sums of squares of each row and part of columns, float64; of a vector, the squares."""
    if gradient.dim() == 1:
        return gradient.double().square()
    columns = parts // shard.tp.size if shard.tp_dim == gradient.dim() - 1 else 1
    pieces = gradient.unflatten(-1, (columns, -1)).contiguous()
    squares: Tensor = torch.linalg.vector_norm(pieces, dim=-1).double().square().flatten()
    return squares


def build_tree_reducer(model: nn.Module, ctx: ParallelContext, *, zero: int, **options: Any) -> "TreeReducer":
    """`build_reducer` for sums in one order at every layout."""
    if zero == 0 or ctx.replicas.group is None:
        return TreeReducer(model, ctx)
    # sums are not made in backward passes, and weights are cast where each rank's are without zero
    options |= {"late_weights": True, "compute_dtype": next(model.parameters()).dtype}
    # kernels take the numbers of a vector sixteen at a time, and compute the rest in another way
    whole = [p for p in model.parameters() if p.dim() == 1 and len(p) % (16 * ctx.replicas.size)]
    options["replicated"] = [*options.get("replicated", ()), *whole]
    sharded = build_reducer(model, ctx.replicas, zero=zero, **options)
    return TreeReducer(model, ctx, cast("ShardedReducer", sharded))


class TreeReducer:
    """The Reducer of exact sums. With zero=2|3 `sharded` keeps the weights; their gradients are taken here.

    A tied table's gradient is the sum of two trees, of its lookups and of the output layer, as in a pipeline.
    Over cp each micro-batch's are summed as they come.
    """

    def __init__(
        self, model: nn.Module, ctx: ParallelContext, sharded: "ShardedReducer | None" = None
    ) -> None:
        self.cp, self.sharded, self.sync_late = ctx.cp, sharded, False
        self.slices = {} if sharded is None else dict(sharded.slices)
        self.trees = {p: GradientTree() for p in model.parameters() if p.requires_grad}
        self.axes = {p: axis for axis, ps in parameters_by_axis(model, ctx.dp).items() for p in ps}
        for p in self.trees:
            if p not in self.slices:
                p.register_post_accumulate_grad_hook(self._take)
        self.leaf = 1
        self.added: dict[nn.Parameter, list[GradientTree]] = {}
        """Trees of gradients that modules add: of lookups, and from each source of an expert's rows."""
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.add_lookup = partial(self._add, module.weight)
            if isinstance(module, Experts):
                weights = module.named_parameters(recurse=False)
                module.add_gradients = {name: partial(self._add, p) for name, p in weights}

    @property
    def sync(self) -> bool:
        """False: nothing is summed over ranks before `finish`."""
        return False

    @sync.setter
    def sync(self, value: bool) -> None:
        self.settle()

    def settle(self) -> None:
        """Take in the gradients of sharded weights, which the newest pass left."""
        if self.sharded is None:
            return
        for weight in self.sharded.gathered_parameters():
            full = getattr(weight, "_unsharded_param", None)
            if full is not None and full.grad is not None:
                self.trees[weight.sharded_param].add(sum_over_ranks(full.grad, self.cp))
                full.grad = None

    def expect(self, leaf: int) -> None:
        """Prepare for a step in which `leaf` micro-batches make a leaf."""
        self.leaf = leaf
        for tree in (*self.trees.values(), *chain(*self.added.values())):
            tree.leaf = leaf

    def start_step(self) -> None:
        if self.sharded is not None:
            self.sharded.start_step()
        for p, tree in self.trees.items():
            p.grad = None
            for each in (tree, *self.added.get(p, ())):
                each.open, each.closed, each.count = None, [], 0

    def drop_gathered(self) -> None:
        if self.sharded is not None:
            self.sharded.drop_gathered()

    def finish(self) -> None:
        """Sum over dp, and assign."""
        self.settle()
        totals = {p: self._summed(p, tree) for p, tree in self.trees.items()}
        for p, trees in self.added.items():
            terms = [x for tree in trees if (x := self._summed(p, tree)) is not None]
            if terms:
                added, output = sum_of_sources(terms), totals[p]
                totals[p] = added if output is None else output.add_(added)
        for p, total in totals.items():
            target = self.slices[p].parameter if p in self.slices else p
            target.grad = total

    def _summed(self, p: nn.Parameter, tree: GradientTree) -> Tensor | None:
        """The sum over dp of what a tree holds: all of it, or this rank's rows."""
        total = tree.take()
        if total is None:
            return None
        total = sum_over_ranks(total, self.axes[p], nearest_first=False)
        if p not in self.slices:
            return total
        rows = self.slices[p]
        return total[rows.first_row : rows.first_row + len(rows.parameter)].clone()

    def _add(self, p: nn.Parameter, *terms: Tensor) -> None:
        """Add the gradients of a pass: of a lookup, or of experts from each source."""
        trees = self.added.setdefault(p, [])
        while len(trees) < len(terms):
            trees.append(GradientTree(self.leaf))
        for tree, term in zip(trees, terms, strict=True):
            tree.add(term)

    def _take(self, p: Tensor) -> None:
        if p.grad is not None:  # hooks of what a pass puts off, or adds elsewhere, are called all the same
            # its buffer is that of `sharded`, which writes the next micro-batch's there
            gradient = p.grad if self.sharded is None else p.grad.clone()
            self.trees[p].add(sum_over_ranks(gradient, self.cp))  # type: ignore[index]
            p.grad = None
