"""Communication over one axis: collectives, transfers, and the conjugate pairs around split regions.

Tensor parallelism (arXiv:1909.08053, section 3): f = `copy_to_tp` is the identity forward and an all-reduce
backward, g = `reduce_from_tp` its conjugate. Sequence parallelism (arXiv:2205.05198, section 4.2.2) puts an
all-gather along the sequence in f's place and a reduce-scatter in g's: `gather_sequence`,
`scatter_sequence`. On an axis of one rank all of them are the identity. At the end are asynchronous copies
between host and device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mlm.parallel.mailbox import MailboxMessage
from mlm.parallel.mesh import AXES, Axis
from mlm.parallel.watch import Wait

P = ParamSpec("P")
R = TypeVar("R")
AxisFunction = Callable[Concatenate[Tensor, Axis, P], R]

gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Their names since torch 2.13, and the ones before."""


@dataclass(slots=True)
class Pending:
    """A communication in progress."""

    op: str
    """Its name in errors."""
    axis: Axis
    out: Tensor
    """Result of `wait`; not to be read or written before."""
    work: "dist.Work | MailboxMessage | _Swap | None"
    """None without communication."""
    ranks: tuple[int, ...] = ()
    """Global ranks of the operation; empty for all of the axis."""
    buffer: Tensor | None = None
    """Buffer that the transport writes if not `out`; `wait` copies it into `out`."""

    def wait(self) -> Tensor:
        """Return the result, ready for the device's current stream. Raises LostPeer if a peer is lost."""
        if self.work is not None:
            with _watched(self.op, self.axis, self.ranks):
                self.work.wait()
            self.work = None
            if self.buffer is not None and self.buffer is not self.out:
                self.out.copy_(self.buffer)
                self.buffer = None
            if self.out.is_cuda:  # the stream waits, not this thread: an event shows the end
                event = torch.cuda.Event()
                event.record()
                ranks = self.ranks or self.axis.ranks
                self.axis.watch.follow(self.op, self.axis.name, ranks, event.query)
        return self.out


def _watched(op: str, axis: Axis, ranks: tuple[int, ...] = ()) -> Wait:
    """Wait around an operation that may block or fail: gloo fails at the start, NCCL connects then."""
    return axis.watch.waiting(op, axis.name, ranks or axis.ranks)


@torch.no_grad()
def for_transport(x: Tensor, axis: Axis) -> Tensor:
    """Return `x`, or a copy in host memory if the axis's transport reads only that."""
    return x.to("cpu", copy=True) if axis.through_host else x


def start_all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Begin to reduce `x` over the axis in place."""
    if axis.group is None:
        return Pending("all_reduce", axis, x, None)
    buffer = for_transport(x, axis)
    with _watched("all_reduce", axis):
        if axis.swaps and op == dist.ReduceOp.SUM:
            swap = _start_message(buffer, axis, buffer, Tensor.add_) or _Swap(buffer, axis)
            return Pending("all_reduce", axis, x, swap, buffer=buffer)
        work = dist.all_reduce(buffer, op=op, group=axis.group, async_op=True)
    return Pending("all_reduce", axis, x, work, buffer=buffer)


def _start_message(
    sent: Tensor, axis: Axis, target: Tensor, take: Callable[[Tensor, Tensor], Tensor]
) -> MailboxMessage | None:
    """Exchange tensors with the other of two ranks: `take(target, received)`. None if gloo must do it."""
    return axis.mailbox.start(sent, target, take) if axis.swaps and axis.mailbox is not None else None


class _Swap:
    """In-place sum over two ranks that exchange whole tensors.

    Bit-equal to gloo's ring, in which the two wait for each other piece by piece.
    """

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.x, self.peer_x = x, torch.empty_like(x)
        peer = 1 - axis.rank
        self.sent = dist.isend(x, group=axis.group, group_dst=peer)
        self.received = dist.irecv(self.peer_x, group=axis.group, group_src=peer)

    def wait(self) -> None:
        for work in (self.received, self.sent):
            assert work is not None
            work.wait()
        self.x.add_(self.peer_x)


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Begin to gather […] of each rank into `out` [size, …] in rank order, on every rank.

    `x` may be this rank's part of `out`.
    """
    out = x.new_empty((axis.size, *x.shape)) if out is None else out
    if axis.group is None:
        return Pending("all_gather", axis, out.copy_(x), None)
    buffer, sent = for_transport(out, axis), for_transport(x.contiguous(), axis)
    with _watched("all_gather", axis):
        if axis.swaps and (swap := _start_message(sent, axis, buffer[1 - axis.rank], Tensor.copy_)):
            if buffer[axis.rank].data_ptr() != sent.data_ptr():
                buffer[axis.rank] = sent
            return Pending("all_gather", axis, out, swap, buffer=buffer)
        work = gather_flat(buffer.view(-1), sent.view(-1), group=axis.group, async_op=True)
    return Pending("all_gather", axis, out, work, buffer=buffer)


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Begin to sum `x` [n, …] over the axis and keep this rank's [n/size, …], in `out`."""
    assert x.shape[0] % axis.size == 0, f"{x.shape[0]} rows over {axis.name}={axis.size}"
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:])) if out is None else out
    if axis.group is None:
        return Pending("reduce_scatter", axis, out.copy_(x[: len(out)]), None)
    buffer, sent = for_transport(out, axis), for_transport(x.contiguous(), axis)
    with _watched("reduce_scatter", axis):
        if axis.swaps:
            local, remote = (sent.unflatten(0, (2, -1))[rank] for rank in (axis.rank, 1 - axis.rank))
            if swap := _start_message(remote, axis, buffer, Tensor.add_):
                buffer.copy_(local)
                return Pending("reduce_scatter", axis, out, swap, buffer=buffer)
        work = scatter_flat(buffer.view(-1), sent.view(-1), group=axis.group, async_op=True)
    return Pending("reduce_scatter", axis, out, work, buffer=buffer)


def start_all_to_all(x: Tensor, axis: Axis, sizes_to: Sequence[int], sizes_from: Sequence[int]) -> Pending:
    """Begin to send each rank its rows of `x`, in rank order: [sum of sizes_to, …] -> [sum of sizes_from, …].

    `sizes_to` are the numbers of rows for each rank, `sizes_from` from each rank.
    """
    assert len(x) == sum(sizes_to)
    out = x.new_empty((sum(sizes_from), *x.shape[1:]))
    if axis.group is None:
        return Pending("all_to_all", axis, out.copy_(x), None)
    buffer, sent = for_transport(out, axis), for_transport(x.contiguous(), axis)
    with _watched("all_to_all", axis):
        sizes = list(sizes_from), list(sizes_to)
        work = dist.all_to_all_single(buffer, sent, *sizes, group=axis.group, async_op=True)
    return Pending("all_to_all", axis, out, work, buffer=buffer)


def start_send(x: Tensor, axis: Axis, peer: int) -> Pending:
    """Begin to send a contiguous tensor to rank `peer` of the axis; it must not change before `wait`."""
    assert axis.group is not None
    assert x.is_contiguous()
    op, ranks = f"send to rank {axis.ranks[peer]}", _pair(axis, peer)
    x = for_transport(x, axis)
    with _watched(op, axis, ranks):
        work = dist.isend(x, group=axis.group, group_dst=peer)
    return Pending(op, axis, x, work, ranks)


def start_receive(out: Tensor, axis: Axis, peer: int) -> Pending:
    """Begin to receive into a contiguous tensor from rank `peer` of the axis."""
    assert axis.group is not None
    assert out.is_contiguous()
    op, ranks = f"receive from rank {axis.ranks[peer]}", _pair(axis, peer)
    buffer = for_transport(out, axis)
    with _watched(op, axis, ranks):
        work = dist.irecv(buffer, group=axis.group, group_src=peer)
    return Pending(op, axis, out, work, ranks, buffer)


def _pair(axis: Axis, peer: int) -> tuple[int, ...]:
    return tuple(sorted((axis.ranks[axis.rank], axis.ranks[peer])))


def traceable(
    schema: str, outputs: Callable[..., object], changes: Sequence[str] = ()
) -> Callable[[AxisFunction[P, R]], AxisFunction[P, R]]:
    """Make a function of (tensor, axis, …) one operator in graphs of torch.compile.

    Messages and waits are hidden from the compiler and overlap as before. In `schema` the axis is a string.
    `outputs` returns empty outputs for the same arguments; `changes` names mutated arguments.
    """

    def decorate(function: AxisFunction[P, R]) -> AxisFunction[P, R]:
        def by_name(of: Callable[..., object]) -> Callable[..., object]:
            return lambda x, axis, *args: of(x, AXES[axis], *args)

        name = f"mlm::{function.__name__}"
        operator = torch.library.custom_op(name, by_name(function), mutates_args=changes, schema=schema)
        operator.register_fake(by_name(outputs))

        @wraps(function)
        def call(x: Tensor, axis: Axis, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if axis.group is not None and torch.compiler.is_compiling():
                return operator(x, axis.group.group_name, *args, **kwargs)  # type: ignore[no-any-return]
            return function(x, axis, *args, **kwargs)

        return call

    return decorate


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `x` over the axis in place and return it."""
    if axis.group is None:
        return x
    if torch.compiler.is_compiling():  # torch.compile knows this form only
        dist.all_reduce(x, op=op, group=axis.group)
        return x
    return start_all_reduce(x, axis, op).wait()


@traceable("(Tensor x, str axis) -> Tensor", lambda x, axis: x.new_empty((axis.size, *x.shape)))
def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[…] of each rank -> [size, …] in rank order, on every rank."""
    return start_all_gather(x, axis).wait()


def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """[n, …] of each rank -> [size * n, …] in rank order, on every rank."""
    return all_gather(x, axis).flatten(0, 1)


@traceable(
    "(Tensor x, str axis) -> Tensor",
    lambda x, axis: x.new_empty((x.shape[0] // axis.size, *x.shape[1:])),
)
def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[n, …] -> [n/size, …]: the sum over the axis, each rank keeping its share of rows."""
    return start_reduce_scatter(x, axis).wait()


def all_to_all(x: Tensor, axis: Axis, sizes_to: Sequence[int], sizes_from: Sequence[int]) -> Tensor:
    return start_all_to_all(x, axis, sizes_to, sizes_from).wait()


def broadcast(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Overwrite `x` with the tensor of rank `source` of the axis, and return it."""
    if axis.group is not None:
        op, buffer = f"broadcast from rank {axis.ranks[source]}", for_transport(x, axis)
        with _watched(op, axis):
            work = dist.broadcast(buffer, group=axis.group, group_src=source, async_op=True)
        Pending(op, axis, x, work, buffer=buffer).wait()
    return x


def barrier(axis: Axis) -> None:
    """Wait until every rank of a gloo axis has reached this call."""
    if axis.group is not None:
        with _watched("barrier", axis):
            dist.barrier(group=axis.group)


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        # autograd may pass the same tensor to another branch, so reduce a copy
        return all_reduce(dy.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        # in place, as nothing else reads the partial sums; a compiler does so with a copy
        return all_reduce(x.clone() if torch.compiler.is_compiling() else x.detach(), axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return gather_rows(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy, ctx.axis), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return gather_rows(dy, ctx.axis), None


def copy_to_tp(x: Tensor, axis: Axis) -> Tensor:
    """f: enter a region where each tp rank holds its share of a layer. Gradients are summed over tp."""
    return x if axis.size == 1 else _CopyToTP.apply(x, axis)  # type: ignore[no-untyped-call]


def reduce_from_tp(x: Tensor, axis: Axis) -> Tensor:
    """g: leave that region. Sums the partial results over tp, in place; gradients pass unchanged.

    `x` must be contiguous; it is overwritten.
    """
    return x if axis.size == 1 else _ReduceFromTP.apply(x, axis)  # type: ignore[no-untyped-call]


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """All-gather of sequence parallelism (f): [S/t, …] -> [S, …]. Gradients are reduce-scattered over tp."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)  # type: ignore[no-untyped-call]


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter of sequence parallelism (g): partial sums [S, …] -> rows of the sum [S/t, …]."""
    return x if axis.size == 1 else _ScatterSequence.apply(x, axis)  # type: ignore[no-untyped-call]


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device through page-locked memory, without blocking the host."""
    if device.type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class ToHost:
    """Asynchronous copy of a device tensor to the host."""

    def __init__(self, x: Tensor) -> None:
        self.arrived: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            self.x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.x.copy_(x, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()
        else:
            self.x = x

    def read(self) -> list[float]:
        """Return the numbers; waits for the copy only, not for later work of the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values: list[float] = self.x.tolist()
        return values
