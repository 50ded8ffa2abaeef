"""Gradients summed over micro-batches and replicas in one order, and their norm (exact.py)."""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlm.parallel.collectives import all_reduce
from mlm.parallel.exact import TreeSum, farthest_first, sum_over_ranks, tree_sum
from mlm.parallel.expert.experts import Experts
from mlm.parallel.gradients import build_reducer
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import ParameterShard, parameters_by_axis

FIXED_POINT = 2.0**38
"""Units of the largest square in the sum of all squares: 2^24 of them fit into an int64."""


def leaf_order(micro_batches: int, dp: Axis) -> tuple[list[int], int]:
    """Order of a rank's micro-batches, and the number of them in a leaf.

    Micro-batch i of rank r is number i * dp + r of the step, in leaf (i * dp + r) modulo leaves. A level of
    the tree adds leaves whose numbers differ in one bit, the highest first: any dp ranks hold subtrees.
    """
    leaves = math.gcd(micro_batches * dp.size, dp.parts) // dp.size
    order = [i for leaf in farthest_first(range(leaves)) for i in range(leaf, micro_batches, leaves)]
    return order, micro_batches // leaves


@torch.no_grad()
def gradient_square(shards: Sequence[ParameterShard], ctx: ParallelContext) -> Tensor:
    """Square of the gradient's norm, 0-d float64, the same at every layout.

    The squares of each row and part of its columns are added (each element of a vector alone); these sums are
    rounded to whole numbers of units, whose order does not matter.
    """
    axes = (ctx.tp, ctx.pp, ctx.replicas)
    sums = [torch.zeros(1, dtype=torch.float64, device=shards[0].parameter.device)]
    for shard in shards:
        gradient = shard.parameter.grad
        if gradient is None or not gradient.numel() or not shard.is_stored(ctx.replicas):
            continue
        if gradient.dim() > 1:
            columns = ctx.tp.parts // shard.tp.size if shard.tp_dim == gradient.dim() - 1 else 1
            pieces = gradient.unflatten(-1, (columns, -1)).contiguous()
            gradient = torch.linalg.vector_norm(pieces, dim=-1).flatten()
        sums.append(gradient.double().square())
    squares = torch.cat(sums)
    largest = squares.max().nan_to_num(nan=torch.inf)
    for axis in axes:
        all_reduce(largest, axis, dist.ReduceOp.MAX)
    unit = largest.clamp(min=torch.finfo(torch.float64).tiny) / FIXED_POINT
    total = (squares / unit).nan_to_num(0.0, 0.0, 0.0).round_().long().sum()
    for axis in axes:
        all_reduce(total, axis)
    return torch.where(largest.isfinite(), total.double() * unit, largest)


class TreeReducer:
    """Reducer of exact sums. With zero=2|3 `sharded` holds the weights, and their gradients are added here.

    A tied table's gradient is the sum of two trees, for the output layer and for lookups, as in a pipeline;
    an expert's has a tree for each source of its rows. Gradients of each micro-batch are summed over cp at
    once.
    """

    def __init__(self, model: nn.Module, ctx: ParallelContext, *, zero: int, **options: Any) -> None:
        """`options` are of `build_reducer`."""
        self.cp, self.sync_late = ctx.cp, False
        self.sharded: Any = None
        if zero and ctx.replicas.group is not None:
            # no sums in backward passes; weights are cast as without zero
            options |= {"late_weights": True, "compute_dtype": next(model.parameters()).dtype}
            # kernels process vectors sixteen elements at a time and remainders differently
            unsplit = [p for p in model.parameters() if p.dim() == 1 and len(p) % (16 * ctx.replicas.size)]
            options["replicated"] = [*options.get("replicated", ()), *unsplit]
            self.sharded = build_reducer(model, ctx.replicas, zero=zero, **options)
        self.slices = {} if self.sharded is None else dict(self.sharded.slices)
        by_axis = parameters_by_axis(model, ctx.dp).items()
        self.axes = {p: axis for axis, parameters in by_axis for p in parameters if p.requires_grad}
        self.leaf = 1
        """Micro-batches of a leaf in the next step."""
        self.trees: dict[nn.Parameter, dict[int, TreeSum]] = {}
        for p in self.axes.keys() - self.slices.keys():
            p.register_post_accumulate_grad_hook(self._take_gradient)
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.add_lookup = partial(self._add, module.weight, 1)
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
        """Add the gradients of sharded weights from the newest pass."""
        for weight in () if self.sharded is None else self.sharded.gathered_parameters():
            full = getattr(weight, "_unsharded_param", None)
            if full is not None and full.grad is not None:
                self._add(weight.sharded_param, 0, sum_over_ranks(full.grad, self.cp))
                full.grad = None

    def _take_gradient(self, p: Tensor) -> None:
        if p.grad is not None:  # hooks also run for deferred gradients, and for those added elsewhere
            # `sharded` writes the next micro-batch's gradient to the same buffer
            gradient = p.grad if self.sharded is None else p.grad.clone()
            self._add(p, 0, sum_over_ranks(gradient, self.cp))
            p.grad = None

    def _add(self, p: Tensor, number: int, gradient: Tensor) -> None:
        self.trees[p][number].add(gradient)  # type: ignore[index]

    def start_step(self) -> None:
        if self.sharded is not None:
            self.sharded.start_step()
        self.trees = {p: defaultdict(partial(TreeSum, self.leaf)) for p in self.axes}
        for p in self.axes:
            p.grad = None

    def drop_gathered(self) -> None:
        if self.sharded is not None:
            self.sharded.drop_gathered()

    def finish(self) -> None:
        """Sum over dp and assign all rows, or this rank's."""
        self.settle()
        for p, trees in self.trees.items():
            sums = [trees[number].take() for number in sorted(trees)]
            totals = [sum_over_ranks(x, self.axes[p], nearest_first=False) for x in sums]
            if p in self.slices:
                target, first = self.slices[p].parameter, self.slices[p].first_row
                totals = [total[first : first + len(target)].clone() for total in totals]
            else:
                target = p
            target.grad = tree_sum(farthest_first(totals)) if totals else None
