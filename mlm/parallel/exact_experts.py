"""Products of a mixture's experts in parts, in one order at every layout (exact.py).

A product is of the rows that one expert has of one micro-batch, in the order of their tokens. With ep the
rows of several micro-batches arrive at a time, each from its source. The gradients of each go to a tree of
their own, which joins the others where dp would join them (exact_gradients.py).

Shapes: R rows sorted by expert and in it by source, e experts of this rank, H hidden, F width of an expert,
n parts of this rank, w = F / parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlm.parallel.compute_state import choose_copy
from mlm.parallel.exact import sum_over_ranks, tree_sum
from mlm.parallel.expert.experts import Experts
from mlm.parallel.matmul import Runs, grouped_gradients, grouped_product
from mlm.parallel.mesh import Axis


@dataclass(frozen=True)
class SourceRuns:
    """Runs of rows, each of one expert and source: by expert, in it by source."""

    counts: Sequence[Sequence[int]]
    """Rows from each source for each expert."""

    @property
    def sizes(self) -> list[int]:
        return [count for expert in zip(*self.counts, strict=True) for count in expert]

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """Each row times the weight of its expert: [R, I], [e, O, I] -> [R, O]."""
        sources = len(self.counts)
        experts = [weights[i // sources, None] for i in range(sources * len(weights))]
        pairs = zip(x.split(self.sizes), experts, strict=True)
        return torch.cat([grouped_product(rows, w, Runs((len(rows),))) for rows, w in pairs])

    def gradients(self, dy: Tensor, x: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gradients of `product`: of x, and of the weights from each source, [sources, e, O, I]."""
        dx, sources = list[Tensor](), len(self.counts)
        dw = torch.empty(sources, *weights.shape, dtype=dtype, device=x.device)
        runs = zip(dy.contiguous().split(self.sizes), x.split(self.sizes), strict=True)
        for i, (dy_rows, rows) in enumerate(runs):
            expert, source = divmod(i, sources)
            weight = weights[expert, None]
            dx_rows, dw[source, expert] = grouped_gradients(dy_rows, rows, weight, Runs((len(rows),)), dtype)
            dx.append(dx_rows)
        return torch.cat(dx), dw


class ExpertColumns(torch.autograd.Function):
    """x W1^T of experts, in parts: [R, H] -> n of [R, 2 w], gates before the rest."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, experts: Experts, runs: SourceRuns, tp: Axis
    ) -> tuple[Tensor, ...]:
        kept = choose_copy(experts.compute.up_copy, weight, x.dtype)
        ctx.save_for_backward(x, kept)
        ctx.experts, ctx.runs, ctx.tp, ctx.dtype = experts, runs, tp, weight.dtype
        return tuple(runs.product(x, w) for w in _rows_of_parts(kept.to(x.dtype), tp))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, kept = ctx.saved_tensors
        parts = zip(gradients, _rows_of_parts(kept.to(x.dtype), ctx.tp), strict=True)
        pairs = [ctx.runs.gradients(dy, x, w, ctx.dtype) for dy, w in parts]
        if ctx.needs_input_grad[1]:
            dw = torch.cat([dw.unflatten(2, (2, -1)) for _, dw in pairs], 3)  # [sources, e, 2, F/t, H]
            ctx.experts.add_gradients["up"](*dw)
        return sum_over_ranks(tree_sum([dx for dx, _ in pairs]), ctx.tp), None, None, None, None


class ExpertRows(torch.autograd.Function):
    """Sum over all ranks' parts of x W2^T of experts: n of [R, w] -> [R, H]."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, experts: Experts, runs: SourceRuns, tp: Axis, *parts: Tensor
    ) -> Tensor:
        kept = choose_copy(experts.compute.down_copy, weight, parts[0].dtype)
        ctx.save_for_backward(kept, *parts)
        ctx.experts, ctx.runs, ctx.tp, ctx.dtype = experts, runs, tp, weight.dtype
        weights = kept.to(parts[0].dtype).chunk(len(parts), 2)
        terms = [runs.product(x, w.contiguous()) for x, w in zip(parts, weights, strict=True)]
        return sum_over_ranks(tree_sum(terms), tp)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, *parts = ctx.saved_tensors
        weights = kept.to(dy.dtype).chunk(len(parts), 2)
        pairs = [
            ctx.runs.gradients(dy, x, w.contiguous(), ctx.dtype) for x, w in zip(parts, weights, strict=True)
        ]
        if ctx.needs_input_grad[0]:
            ctx.experts.add_gradients["down"](*torch.cat([dw for _, dw in pairs], 3))
        return None, None, None, None, *(dx for dx, _ in pairs)


def _rows_of_parts(weight: Tensor, tp: Axis) -> list[Tensor]:
    """The rows of W1 of each part of this rank: [e, 2, F/t, H] -> n of [e, 2 w, H], laid out alike."""
    return [part.flatten(1, 2) for part in weight.chunk(tp.parts // tp.size, 2)]
