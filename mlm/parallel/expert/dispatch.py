"""Way of tokens to their experts and back.

A rank's tokens are sorted by expert, so that each expert's rows lie together. Experts are split over the ep
axis in runs of consecutive numbers: rows for the same rank lie together too, and go there in one all-to-all.
There they are sorted once more, rows of one expert next to each other, whichever rank sent them.

Shapes: T tokens of this rank, H hidden, k experts per token, E experts, R rows: one per token and expert.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Order:
    """Rows of a rank's tokens, sorted by expert; within an expert by token."""

    slots: Tensor
    """[R] int64: which of the T k slots (token, choice) each row is of."""
    counts: tuple[int, ...]
    """[E]: rows of each expert."""
    per_token: int
    """k."""

    @property
    def tokens(self) -> Tensor:
        """[R] int64: token of each row."""
        return self.slots // self.per_token


def sort_by_expert(experts: Tensor, num_experts: int) -> Order:
    """Order of rows for choices [T, k]; a choice of `num_experts` is dropped and has no row. Waits.

    Shapes alone, on the meta device, are those of even loads.
    """
    flat = experts.flatten()
    if flat.is_meta:
        share, rest = divmod(len(flat), num_experts)
        even = tuple(share + (expert < rest) for expert in range(num_experts))
        return Order(flat, even, experts.shape[1])
    counts = tuple(torch.bincount(flat, minlength=num_experts + 1).tolist()[:num_experts])
    slots = flat.argsort(stable=True)[: sum(counts)]
    return Order(slots, counts, experts.shape[1])


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order, ctx.tokens = order, len(x)
        return x[order.tokens]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        slots = _by_slot(dy, ctx.order, ctx.tokens)  # [T, k, H]
        return slots.sum(1), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.order = order
        slots = _by_slot(y, order, len(weights))  # [T, k, H]
        total = slots[:, 0] * weights[:, 0, None]
        for slot in range(1, order.per_token):
            total.addcmul_(slots[:, slot].to(total.dtype), weights[:, slot, None])
        return total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weights = ctx.saved_tensors
        order: Order = ctx.order
        d_rows = d_out[order.tokens]  # [R, H]
        d_weights = torch.zeros_like(weights)
        d_weights.view(-1)[order.slots] = torch.linalg.vecdot(d_rows.to(weights.dtype), y.to(weights.dtype))
        dy = d_rows * weights.flatten()[order.slots, None]
        return dy.to(y.dtype), d_weights, None


def _by_slot(rows: Tensor, order: Order, tokens: int) -> Tensor:
    """Rows in the order of slots, zeros where a choice was dropped: [R, H] -> [T, k, H]."""
    total = tokens * order.per_token
    make = rows.new_empty if len(rows) == total else rows.new_zeros
    slots = make(total, rows.shape[-1])
    slots[order.slots] = rows
    return slots.view(tokens, order.per_token, -1)


def permute(x: Tensor, order: Order) -> Tensor:
    """A copy of its token for each row: [T, H] -> [R, H]. The gradient of a token is its rows' sum."""
    y: Tensor = _Permute.apply(x, order)  # type: ignore[no-untyped-call]
    return y


def combine(y: Tensor, weights: Tensor, order: Order) -> Tensor:
    """Sum of each token's rows by its weights [T, k], in the order of its choices: [R, H] -> [T, H].

    In the weights' dtype; how rows were sorted or sent changes no bit.
    """
    out: Tensor = _Combine.apply(y, weights, order)  # type: ignore[no-untyped-call]
    return out
