"""Exchange of tokens between the ranks that route them and the ranks that hold their experts.

A rank's tokens are sorted by expert, so that each expert's rows are contiguous. The ep axis splits experts
into runs of consecutive numbers: rows for the same rank are contiguous too, and sent in one all-to-all. The
receiver sorts them by expert again.

`Exchange.start` and `Exchange.finish` are two nodes of the graph, so that computation between them (the
shared experts) overlaps the transfer, forward and backward.

Shapes: T tokens of this rank, H hidden, k experts per token, E experts, R rows: one per token and expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlm.parallel.collectives import Pending, all_to_all, start_all_to_all
from mlm.parallel.matmul import GroupedRows, kernels_for
from mlm.parallel.mesh import CPU, Axis


@dataclass(eq=False)
class Order:
    """Rows of a rank's tokens, sorted by expert; within an expert by token. Numbers are computed once."""

    sorted_slots: Tensor
    """[T k] int64: the slots (token, choice) by expert; slots of dropped choices are last."""
    runs: GroupedRows
    """Rows of each of the E experts."""
    per_token: int
    """k."""
    drops: bool = False
    """True if choices may be dropped: the host then has to read the number of rows."""

    def inverse(self) -> "Order":
        return Order(self.rows, self.runs, 1)

    @cached_property
    def slots(self) -> Tensor:
        """[R] int64: slot of each row."""
        return self.sorted_slots[: sum(self.runs.counts)] if self.drops else self.sorted_slots

    @cached_property
    def tokens(self) -> Tensor:
        """[R] int64: token of each row."""
        return self.slots if self.per_token == 1 else self.slots // self.per_token

    @cached_property
    def rows(self) -> Tensor:
        """[T k] int64: row of each slot; -1 for a dropped choice."""
        slots, total = self.slots, len(self.sorted_slots)
        rows = torch.empty_like(slots) if len(slots) == total else slots.new_full((total,), -1)
        return rows.scatter_(0, slots, torch.arange(len(slots), device=rows.device))


def sort_by_expert(experts: Tensor, num_experts: int, *, drops: bool = True) -> Order:
    """Order of rows for choices [T, k]; a choice of `num_experts` is dropped and has no row.

    `drops` False means that no choice is dropped: then the host of a GPU does not wait for numbers. On the
    meta device, shapes are as for even loads.
    """
    flat = experts.flatten()
    if flat.is_meta:
        share, remainder = divmod(len(flat), num_experts)
        even = tuple(share + (expert < remainder) for expert in range(num_experts))
        return Order(flat, GroupedRows(even), experts.shape[1])
    if flat.is_cpu:  # NumPy sorts numbers of 8 or 16 bits by their digits
        labels = flat.numpy()
        loads: list[int] = np.bincount(labels, minlength=num_experts + 1).tolist()
        slots = torch.from_numpy(labels.astype(np.min_scalar_type(num_experts)).argsort(kind="stable"))
        return Order(slots, GroupedRows(loads[:num_experts]), experts.shape[1], drops)
    return sort_on_device(flat, num_experts, experts.shape[1], drops=drops)


def sort_on_device(labels: Tensor, num_experts: int, per_token: int, *, drops: bool) -> Order:
    """`sort_by_expert` of labels [T k] without reading back."""
    if (kernels := kernels_for(labels)) is not None:
        slots, tokens, rows, ends = kernels.sort_labels(labels, num_experts, per_token)
        order = Order(slots, GroupedRows(ends=ends), per_token, drops)
        order.rows = rows
        if not drops:
            order.tokens = tokens
        return order
    numbers, slots = labels.to(torch.int16).sort(stable=True)
    experts = torch.arange(num_experts, dtype=torch.int16, device=labels.device)
    ends = torch.searchsorted(numbers, experts, right=True, out_int32=True)
    return Order(slots, GroupedRows(ends=ends), per_token, drops)


class _Permute(torch.autograd.Function):
    """Copy each row's token: [T, H] -> [R, H]. The gradient of a token is its rows' sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order, ctx.tokens = order, len(x)
        return x.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        if (kernels := kernels_for(dy)) is not None:
            return kernels.sum_rows(dy, ctx.order.rows, ctx.order.per_token), None
        slots = _by_slot(dy, ctx.order, ctx.tokens)
        if slots.shape[1] == 1:
            return slots[:, 0], None
        if not slots.is_cpu:
            return slots.sum(1), None
        total = slots[:, 0].to(torch.promote_types(slots.dtype, torch.float32))
        for slot in range(1, slots.shape[1]):  # a tenth of the time of a CPU's `sum` over few slots
            total = total + slots[:, slot]
        return total.to(slots.dtype), None


class _Combine(torch.autograd.Function):
    """Sum of each token's rows by its weights [T, k], in the order of its choices: [R, H] -> [T, H].

    Summed in the weights' dtype; bits do not depend on how rows were sorted or sent.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.order = order
        if (kernels := kernels_for(y)) is not None:
            return kernels.sum_rows(y, order.rows, order.per_token, weights)  # type: ignore[no-any-return]
        slots = _by_slot(y, order, len(weights))  # [T, k, H]
        total = slots[:, 0] * weights[:, 0, None]
        for slot in range(1, order.per_token):
            total.addcmul_(slots[:, slot].to(total.dtype), weights[:, slot, None])
        return total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weights = ctx.saved_tensors
        order: Order = ctx.order
        if (kernels := kernels_for(y)) is not None:
            return *kernels.combine_backward(d_out, y, weights, order.slots), None
        d_rows = d_out.index_select(0, order.tokens)  # [R, H]
        dots = torch.linalg.vecdot(d_rows.to(weights.dtype), y.to(weights.dtype)).unsqueeze(-1)
        d_weights = _by_slot(dots, order, len(weights)).squeeze(-1)
        dy = d_rows * weights.flatten().index_select(0, order.slots).unsqueeze(-1)
        return dy.to(y.dtype), d_weights, None


def _by_slot(rows: Tensor, order: Order, tokens: int) -> Tensor:
    """Rows in the order of slots, zeros where a choice was dropped: [R, H] -> [T, k, H]."""
    total = tokens * order.per_token
    if len(rows) == total:
        slots = rows.index_select(0, order.rows)
    else:
        slots = rows.new_zeros(total, rows.shape[-1]).index_copy_(0, order.slots, rows)
    return slots.view(tokens, order.per_token, rows.shape[-1])


permute: Callable[[Tensor, Order], Tensor] = _Permute.apply
combine: Callable[[Tensor, Tensor, Order], Tensor] = _Combine.apply


class Exchange:
    """One all-to-all of rows over the ep axis, and its way back.

    Args:
        ep: axis that splits the experts.
        runs: rows of each of the E experts, in the order in which this rank holds them.
    """

    def __init__(self, ep: Axis, runs: GroupedRows, device: torch.device) -> None:
        self.runs = runs
        """Rows of each expert of this rank, from all ranks."""
        self.order: Order | None = None
        """Order by expert of received rows; None on an axis of one rank."""
        if ep.size == 1:
            return
        ends = runs.ends(device)
        local_count = len(ends) // ep.size
        if ep.group is None or device.type == "meta":  # shapes alone: loads are even
            local = runs.counts[ep.rank * local_count : (ep.rank + 1) * local_count]
            sizes_to = sizes_from = [sum(local)] * ep.size
            sources, by_rank, device = None, torch.tensor(local).repeat(ep.size), CPU
            counts = [ep.size * count for count in local]
        else:  # exchange row counts by rank and expert: the only wait of a layer
            sent, sizes = ends.diff(prepend=ends.new_zeros(1)).long(), [local_count] * ep.size
            by_rank = all_to_all(sent, ep, sizes, sizes)
            table = torch.stack([sent, by_rank]).view(2, ep.size, local_count).tolist()
            runs.counts = tuple(count for row in table[0] for count in row)
            sizes_to, sizes_from = ([sum(row) for row in rows] for rows in table)
            counts, sources = list(map(sum, zip(*table[1], strict=True))), table[1]
        self.outward = _Transfer(ep, sizes_to, sizes_from)
        self.homeward = _Transfer(ep, sizes_from, sizes_to)
        experts = torch.arange(local_count, device=device).repeat(ep.size)
        arriving = experts.repeat_interleave(by_rank, output_size=sum(sizes_from)).unsqueeze(1)
        order = sort_by_expert(arriving, local_count, drops=False)
        self.runs = GroupedRows(counts, None if ends.is_meta else order.runs.ends(device))
        self.runs.sources = sources
        self.order = order if ends.is_cuda else replace(order, sorted_slots=order.slots.to(ends.device))

    def start(self, rows: Tensor) -> Tensor:
        """Begin to send each expert's rows to its rank: [R, H]. Do not read the result before `finish`."""
        return rows if self.order is None else _begin(rows, self.outward)

    def finish(self, rows: Tensor) -> Tensor:
        """Wait for the rows of this rank's experts, sorted by expert: [R', H]."""
        return rows if self.order is None else permute(_end(rows, self.outward), self.order)

    def back(self, rows: Tensor) -> Tensor:
        """Return each row to its sender, in the order of sending: [R', H] -> [R, H]."""
        if self.order is None:
            return rows
        return _end(_begin(permute(rows, self.order.inverse()), self.homeward), self.homeward)


@dataclass(eq=False)
class _Transfer:
    """An all-to-all of rows, and of their gradients the other way round."""

    ep: Axis
    sizes_to: Sequence[int]
    """Rows for each rank."""
    sizes_from: Sequence[int]
    """Rows from each rank."""
    pending: Pending | None = None
    """The all-to-all in progress, in either pass."""

    def wait(self) -> Tensor:
        assert self.pending is not None
        received, self.pending = self.pending.wait(), None
        return received


class _Begin(torch.autograd.Function):
    """Sends rows; backward waits for their gradients, which `_End` sends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.pending = start_all_to_all(x, transfer.ep, transfer.sizes_to, transfer.sizes_from)
        return transfer.pending.out

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.wait(), None


class _End(torch.autograd.Function):
    """Waits for rows; backward sends their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        transfer = ctx.transfer
        transfer.pending = start_all_to_all(dy, transfer.ep, transfer.sizes_from, transfer.sizes_to)
        return dy, None  # only its shape is read


_begin: Callable[[Tensor, _Transfer], Tensor] = _Begin.apply
_end: Callable[[Tensor, _Transfer], Tensor] = _End.apply
