"""The differentiable linear map of all layers, with what tensor parallelism does around it.

Parameters may be kept in float32 while activations are bfloat16 or float16: the weight is cast to the
activations' dtype, by the caller or for each product, and its gradient comes back in the weight's dtype, so
master weights, gradient accumulation and reduction stay in float32.

Where the layer is split by column, the input's gradient is summed over tp (operator f). Here that sum is
under way while the weight's gradient is computed. With sequence parallelism the input is gathered along S
before the product, and again in backward rather than kept, while the input's gradient is computed
(arXiv:2205.05198, section 4.2.2).

What has no product beside it can be communicated in k parts of the sequence (`overlap_chunks`), each beside
the product of another: of the gathers before a product and the sums after it only the first and the last are
then waited for. Where ranks hold rows of their own, a part is of the rows of each.

Shapes: x [S, …, I] or [S/t, …, I], weight [O, I], y [S, …, O]; t = tensor-parallel size, k parts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.parallel import fp8 as in_fp8
from mlm.parallel.collectives import (
    copy_to_tp,
    gather_rows,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from mlm.parallel.compute_state import ComputeState, DeferredWeightGrads, copy_of_dtype
from mlm.parallel.matmul import (
    add_weight_gradient,
    bias_gradient,
    product,
    uses_onednn,
    weight_gradient,
)
from mlm.parallel.mesh import Axis
from mlm.parallel.uncompiled import skip_compile

SINGLE_RANK = Axis("tp")
DEFAULT_COMPUTE = ComputeState()
"""Of a product on its own: nothing is deferred, fused or cast before."""
Product = Callable[[Tensor], Tensor]
"""[…, I] -> […, O], each row for itself."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast: Tensor | None,
        cast_bias: Tensor | None,
        tp: Axis,
        sequence_parallel: bool,
        deferred: DeferredWeightGrads | None,
        fp8: bool,
        fused_grad: Tensor | None,
        parts: int,
    ) -> Tensor:
        # the weight as it is kept: a cast of our own is cheaper made twice than saved
        cast = copy_of_dtype(cast, x.dtype)
        used = weight if cast is None else cast
        ctx.save_for_backward(x, used)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        ctx.tp, ctx.sequence_parallel, ctx.deferred, ctx.fp8 = tp, sequence_parallel, deferred, fp8
        # recomputation hands a placeholder of the saved weight to backward, whose gradient would be lost
        ctx.leaf, ctx.fused_grad = None if deferred is None else weight, fused_grad
        multiply = in_fp8.product if fp8 else product
        cast_bias = copy_of_dtype(cast_bias, x.dtype)
        offset = bias if cast_bias is None else cast_bias
        narrow, offset = used.to(x.dtype), None if offset is None else offset.to(x.dtype)
        if sequence_parallel and parts > 1:
            return gathered_products(x, tp, parts, [lambda rows: multiply(rows, narrow, offset)])[0]
        whole = gather_rows(x, tp) if sequence_parallel else x
        return multiply(whole, narrow, offset)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tp, deferred = ctx.tp, ctx.deferred
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        later = deferred is not None and deferred.open
        gather = ctx.sequence_parallel and needs_weight and not later
        gathering = start_all_gather(x, tp) if gather else None
        dx = dw = db = summing = None
        if needs_x:
            narrow = weight.to(dy.dtype)
            dx = in_fp8.input_gradient(dy, narrow) if ctx.fp8 else product(dy, narrow.t())
            if ctx.sequence_parallel:
                summing = start_reduce_scatter(dx, tp)
            elif tp.size > 1:
                summing = start_all_reduce(dx, tp)
        dy2 = dy.reshape(-1, dy.shape[-1])  # [rows, O]
        if needs_weight and later:
            gather_over = tp if ctx.sequence_parallel else None
            deferred.add(_weight_job(x, [ctx.leaf], ctx.fused_grad, [dy2], gather_over, ctx.fp8))
        elif needs_weight:
            whole = x if gathering is None else gathering.wait()
            dw = _own_gradient(whole, ctx.weight_dtype, ctx.fused_grad, dy2, ctx.fp8)
        if needs_bias:
            db = bias_gradient(dy2, ctx.bias_dtype)
        dx = summing.wait() if summing is not None else dx
        return dx, dw, db, None, None, None, None, None, None, None, None


class _RowParallel(torch.autograd.Function):
    """x weight^T summed over tp, in parts whose sums are under way while the next is multiplied."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        cast: Tensor | None,
        tp: Axis,
        sequence_parallel: bool,
        deferred: DeferredWeightGrads | None,
        fp8: bool,
        fused_grad: Tensor | None,
        parts: int,
    ) -> Tensor:
        cast = copy_of_dtype(cast, x.dtype)
        used = weight if cast is None else cast
        ctx.save_for_backward(x, used)
        ctx.weight_dtype, ctx.fused_grad, ctx.fp8 = weight.dtype, fused_grad, fp8
        ctx.gather_over, ctx.parts, ctx.deferred = tp if sequence_parallel else None, parts, deferred
        ctx.leaf = None if deferred is None else weight
        multiply, narrow = in_fp8.product if fp8 else product, used.to(x.dtype)
        leave = scattered_product if sequence_parallel else summed_product
        return leave(x, tp, parts, lambda rows: multiply(rows, narrow))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        narrow, deferred = weight.to(dy.dtype), ctx.deferred

        def times_weight(rows: Tensor) -> Tensor:
            return in_fp8.input_gradient(rows, narrow) if ctx.fp8 else product(rows, narrow.t())

        if ctx.gather_over is None:
            dx = times_weight(dy)
        else:  # the gathered gradient is kept: the weight's gradient is a product with all of it
            dy, dx = gathered_products(dy, ctx.gather_over, ctx.parts, [lambda rows: rows, times_weight])
        dy2, dw = dy.reshape(-1, dy.shape[-1]), None
        if ctx.needs_input_grad[1]:
            if deferred is not None and deferred.open:
                deferred.add(_weight_job(x, [ctx.leaf], ctx.fused_grad, [dy2], None, ctx.fp8))
            else:
                dw = _own_gradient(x, ctx.weight_dtype, ctx.fused_grad, dy2, ctx.fp8)
        return dx, dw, None, None, None, None, None, None, None


class _Pair(torch.autograd.Function):
    """Two layers split by column of one input, which is gathered once, as its gradient is summed once."""

    @staticmethod
    def forward(
        ctx: Any,
        tp: Axis,
        sequence_parallel: bool,
        computes: tuple[ComputeState, ComputeState],
        x: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:2], parameters[2:]
        ctx.tp, ctx.sequence_parallel, ctx.fp8 = tp, sequence_parallel, computes[0].fp8
        ctx.deferred = computes[0].deferred
        ctx.leaves = None if ctx.deferred is None else weights
        ctx.dtypes = [None if p is None else p.dtype for p in parameters]
        casts = [copy_of_dtype(compute.weight_copy, x.dtype) for compute in computes]
        used = [w if cast is None else cast for cast, w in zip(casts, weights, strict=True)]
        ctx.save_for_backward(x, *used)
        casts = [copy_of_dtype(compute.bias_copy, x.dtype) for compute in computes]
        offsets = [b if cast is None else cast for cast, b in zip(casts, biases, strict=True)]
        multiply = in_fp8.product if ctx.fp8 else product
        products = [
            partial(multiply, weight=w.to(x.dtype), bias=None if b is None else b.to(x.dtype))
            for w, b in zip(used, offsets, strict=True)
            if w is not None
        ]
        chunks = computes[0].overlap_chunks
        if sequence_parallel and chunks > 1 and x.shape[0] % chunks == 0:
            return tuple(gathered_products(x, tp, chunks, products))
        whole = gather_rows(x, tp) if sequence_parallel else x
        return tuple(times(whole) for times in products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        tp, later = ctx.tp, ctx.deferred is not None and ctx.deferred.open
        needs_x, needs_weights = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        gather = ctx.sequence_parallel and needs_weights and not later
        gathering = start_all_gather(x, tp) if gather else None
        summing = None
        if needs_x:
            first, second = (
                in_fp8.input_gradient(dy, w.to(dy.dtype)) if ctx.fp8 else product(dy, w.to(dy.dtype).t())
                for dy, w in zip(gradients, weights, strict=True)
            )
            start = start_reduce_scatter if ctx.sequence_parallel else start_all_reduce
            summing = start(first.add_(second), tp)
        rows = [dy.reshape(-1, dy.shape[-1]) for dy in gradients]  # each [rows, O]
        dw: list[Tensor | None] = [None, None]
        if needs_weights and later:
            gather_over = tp if ctx.sequence_parallel else None
            ctx.deferred.add(_weight_job(x, ctx.leaves, None, rows, gather_over, ctx.fp8))
        elif needs_weights:
            whole = x if gathering is None else gathering.wait()
            dw = [
                _own_gradient(whole, dtype, None, dy, ctx.fp8)
                for dy, dtype in zip(rows, ctx.dtypes, strict=False)
            ]
        db = [
            bias_gradient(dy, dtype) if dtype is not None else None
            for dy, dtype in zip(rows, ctx.dtypes[2:], strict=True)
        ]
        return None, None, None, summing.wait() if summing is not None else None, *dw, *db


def _own_gradient(
    x: Tensor, dtype: torch.dtype, fused_grad: Tensor | None, dy: Tensor, fp8: bool
) -> Tensor | None:
    """Return the weight's gradient [O, I], from x […, I] and dy [rows, O]; None if it was added to a sum."""
    x = x.reshape(-1, x.shape[-1])
    if fused_grad is not None:
        add_weight_gradient(fused_grad, dy, x)
        return None
    return (in_fp8.weight_gradient if fp8 else weight_gradient)(dy, x, dtype)


def _weight_job(
    x: Tensor,
    weights: Sequence[Tensor],
    fused_grad: Tensor | None,
    gradients: Sequence[Tensor],
    gather_over: Axis | None,
    fp8: bool,
) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        whole = x if gather_over is None else gather_rows(x, gather_over)
        for weight, dy in zip(weights, gradients, strict=True):
            dw = _own_gradient(whole, weight.dtype, fused_grad, dy, fp8)
            if dw is not None:
                torch.autograd.backward(weight, dw)  # adds to .grad and runs the hooks that wait for it

    return run


def gathered_products(x: Tensor, tp: Axis, parts: int, products: Sequence[Product]) -> list[Tensor]:
    """Return products of the rows of all ranks: [S/t, B, I] -> [S, B, O] each.

    `x` are this rank's rows; `products` map a part's rows [S/k, B, I], k = `parts`, which divides S/t.
    """
    arriving = [start_all_gather(part, tp) for part in x.chunk(parts)]
    found: list[Tensor] = []
    for i, pending in enumerate(arriving):
        rows = pending.wait()  # [t, S/(tk), B, I]
        made = [product(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]) for product in products]
        if not found:
            found = [part.new_empty((tp.size, parts, *part.shape[1:])) for part in made]
        for whole, part in zip(found, made, strict=True):
            whole[:, i] = part
    return [whole.flatten(0, 2) for whole in found]


def scattered_product(x: Tensor, tp: Axis, parts: int, product: Product) -> Tensor:
    """Return this rank's rows of the sum over tp: [S, B, I/t] -> [S/t, B, O]. tk must divide S."""
    rows = x.unflatten(0, (tp.size, parts, -1))  # [t, k, S/(tk), B, I/t]
    leaving = [start_reduce_scatter(product(rows[:, i].flatten(0, 1)), tp) for i in range(parts)]
    return torch.cat([pending.wait() for pending in leaving])


def summed_product(x: Tensor, tp: Axis, parts: int, product: Product) -> Tensor:
    """Return the sum over tp: [S, B, I/t] -> [S, B, O]. k must divide S."""
    leaving = [start_all_reduce(product(part), tp) for part in x.chunk(parts)]
    return torch.cat([pending.wait() for pending in leaving])


_eager_linear: Callable[..., Tensor] = skip_compile(_Linear.apply)
"""torch.compile traces neither communication that is waited for later nor deferred products."""
_eager_row_parallel: Callable[..., Tensor] = skip_compile(_RowParallel.apply)
_eager_pair: Callable[..., tuple[Tensor, Tensor]] = skip_compile(_Pair.apply)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, compute: ComputeState = DEFAULT_COMPUTE
) -> Tensor:
    """Return x weight^T + bias, differentiable; weight and bias may be of a wider dtype than x.

    With `compute.fused_grad` backward adds the weight's gradient to it, past autograd: no hook of the weight
    hears of it.
    """
    is_plain = compute.is_plain and x.dtype == weight.dtype and not uses_onednn(x, weight)
    if is_plain and x.is_contiguous():  # of another PyTorch would keep a copy
        return F.linear(x, weight, bias)  # the same products; a node of ours takes as long as a small one
    apply: Callable[..., Tensor] = _Linear.apply if compute.deferred is None else _eager_linear
    return apply(x, weight, bias, *_copies(compute, bias), SINGLE_RANK, False, *_ways(compute), 1)


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tp: Axis,
    *,
    sequence_parallel: bool = False,
    compute: ComputeState = DEFAULT_COMPUTE,
) -> Tensor:
    """This rank's output features of a layer split by column: [S, B, I] -> [S, B, O/t].

    With `sequence_parallel` x holds this rank's rows of the sequence, [S/t, B, I]. The gradient of x is
    summed over tp. It is gathered and multiplied in `compute.overlap_chunks`, or whole if they do not divide
    its rows.
    """
    if tp.size == 1:
        return linear(x, weight, bias, compute)
    if torch.compiler.is_compiling() and not sequence_parallel and compute.deferred is None:
        return linear(copy_to_tp(x, tp), weight, bias, compute)
    chunks = compute.overlap_chunks if x.shape[0] % compute.overlap_chunks == 0 else 1
    return _eager_linear(
        x, weight, bias, *_copies(compute, bias), tp, sequence_parallel, *_ways(compute), chunks
    )


def column_parallel_pair(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    tp: Axis,
    *,
    sequence_parallel: bool,
    computes: tuple[ComputeState, ComputeState],
) -> tuple[Tensor, Tensor]:
    """Two layers split by column of one input, as `column_parallel_linear`: queries, and keys with values.

    They are apart because tensor-parallel ranks hold different parts of each.
    """
    if tp.size == 1:
        first, second = (linear(x, *each) for each in zip(weights, biases, computes, strict=True))
        return first, second
    return _eager_pair(tp, sequence_parallel, computes, x, *weights, *biases)


def row_parallel_linear(
    x: Tensor, weight: Tensor, tp: Axis, *, sequence_parallel: bool = False, compute: ComputeState
) -> Tensor:
    """Sum over tp of the products of a layer split by row, in chunks: [S, B, I/t] -> [S, B, O].

    With `sequence_parallel` this rank's rows of it, [S/t, B, O]. `compute.overlap_chunks` must divide them.
    """
    copy, chunks = compute.weight_copy, compute.overlap_chunks
    return _eager_row_parallel(x, weight, copy, tp, sequence_parallel, *_ways(compute), chunks)


def _copies(compute: ComputeState, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return compute.weight_copy, None if bias is None else compute.bias_copy


def _ways(compute: ComputeState) -> tuple[DeferredWeightGrads | None, bool, Tensor | None]:
    return compute.deferred, compute.fp8, compute.fused_grad
