"""The differentiable linear map of all layers, with the communication of tensor parallelism.

Parameters may be float32 while activations are bfloat16 or float16: the weight is cast to the activations'
dtype, by the caller or for each product, and its gradient has the weight's dtype, so master weights, gradient
accumulation and reduction stay in float32.

In a layer split by column, the input's gradient is summed over tp (operator f) while the weight's gradient is
computed. With sequence parallelism the input is gathered along S before the product, and, instead of saving
it, again in backward while the input's gradient is computed (arXiv:2205.05198, section 4.2.2).

Gathers before a product and sums after it overlap with computation if they are communicated in k parts of the
sequence (`overlap_chunks`), each during the product of another part. Only the first gather and the last sum
are then exposed. If ranks hold different rows, a part has rows of each rank.

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
    gather_rows,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    traceable,
)
from mlm.parallel.compute_state import ComputeState, DeferredWeightGrads, choose_copy, skip_compile
from mlm.parallel.matmul import add_weight_gradient, bias_gradient, product, uses_onednn, weight_gradient
from mlm.parallel.mesh import Axis

DEFAULT_COMPUTE = ComputeState()
"""Nothing is deferred, fused or cast before."""
Product = Callable[[Tensor], Tensor]
"""[…, I] -> […, O], each row for itself."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, compute: ComputeState = DEFAULT_COMPUTE
) -> Tensor:
    """Return x weight^T + bias, differentiable; weight and bias may have a wider dtype than x.

    With `compute.fused_grad` backward adds the weight's gradient to it, without autograd or hooks.
    """
    is_plain = compute.is_plain and x.dtype == weight.dtype and not uses_onednn(x, weight)
    if is_plain and x.is_contiguous():  # PyTorch would save a copy of a strided input
        return F.linear(x, weight, bias)  # same products without the overhead of a custom node
    apply: Callable[..., Tensor] = _apply if compute.deferred is None else _apply_uncompiled
    copies = compute.weight_copy, None if bias is None else compute.bias_copy
    grads = compute.deferred, compute.fused_grad
    if compute.fp8 and in_fp8.fits(x.numel() // x.shape[-1], *weight.shape):
        return apply(_Fp8Linear, x, weight, bias, *copies, compute.weight_8, *grads)
    return apply(_Linear, x, weight, bias, *copies, *grads)


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

    With `sequence_parallel` x holds this rank's rows of the sequence, [S/t, B, I], which are gathered in
    `compute.overlap_chunks`, or at once if these do not divide the rows. The gradient of x is summed over tp.
    """
    if tp.size == 1:
        return linear(x, weight, bias, compute)
    apply: Callable[..., Tensor] = _apply if compute.deferred is None else _apply_uncompiled
    return apply(_ColumnParallel, x, tp, sequence_parallel, (compute,), weight, bias)[0]


def column_parallel_pair(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    tp: Axis,
    *,
    sequence_parallel: bool,
    computes: tuple[ComputeState, ComputeState],
) -> tuple[Tensor, Tensor]:
    """Two layers split by column with one input, as `column_parallel_linear`: queries, and keys with values.

    The input is gathered once, and its gradient is summed once.
    """
    if tp.size == 1:
        first, second = map(partial(linear, x), weights, biases, computes)
    else:
        apply = _apply if computes[0].deferred is None else _apply_uncompiled
        first, second = apply(_ColumnParallel, x, tp, sequence_parallel, computes, *weights, *biases)
    return first, second


def row_parallel_linear(
    x: Tensor, weight: Tensor, tp: Axis, *, sequence_parallel: bool = False, compute: ComputeState
) -> Tensor:
    """Sum over tp of the products of a layer split by row, in chunks: [S, B, I/t] -> [S, B, O].

    With `sequence_parallel` this rank's rows, [S/t, B, O]. `compute.overlap_chunks` must divide the rows.
    """
    apply: Callable[..., Tensor] = _apply if compute.deferred is None else _apply_uncompiled
    return apply(_RowParallel, x, weight, tp, sequence_parallel, compute)


def _apply(function: Any, *arguments: object) -> Any:
    return function.apply(*arguments)


_apply_uncompiled = skip_compile(_apply)
"""Deferred products keep tensors, whose memory compiled code would reuse."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_copy: Tensor | None,
        bias_copy: Tensor | None,
        deferred: DeferredWeightGrads | None,
        fused_grad: Tensor | None,
    ) -> Tensor:
        # save the uncast weight: casting twice is cheaper than keeping a cast
        saved = choose_copy(weight_copy, weight, x.dtype)
        ctx.save_for_backward(x, saved)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        ctx.deferred, ctx.fp8, ctx.fused_grad = deferred, False, fused_grad
        # recomputation passes a placeholder of the saved weight to backward, whose gradient would be lost
        ctx.leaves = None if deferred is None else [weight]
        offset = None if bias is None else choose_copy(bias_copy, bias, x.dtype).to(x.dtype)
        return product(x, saved.to(x.dtype), offset)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = product(dy, weight.to(dy.dtype).t()) if needs_x else None
        rows, dw = dy.reshape(-1, dy.shape[-1]), None  # [rows, O]
        if needs_weight and ctx.deferred is not None and ctx.deferred.open:
            _defer_weight_gradients(ctx, x, [rows])
        elif needs_weight:
            dw = _weight_gradient(x, ctx.weight_dtype, ctx.fused_grad, rows, ctx.fp8)
        db = bias_gradient(rows, ctx.bias_dtype) if needs_bias else None
        return dx, dw, db, None, None, None, None


class _Fp8Linear(torch.autograd.Function):
    """`_Linear` of 8-bit operands, cast once: x and dy for two products each, weights for a step."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_copy: Tensor | None,
        bias_copy: Tensor | None,
        weight_8: in_fp8.Operand | None,
        deferred: DeferredWeightGrads | None,
        fused_grad: Tensor | None,
    ) -> Tensor:
        x8, w8 = in_fp8.cast(x.reshape(-1, x.shape[-1]), in_fp8.NARROW), weight_8
        saved: list[Tensor] = []
        if w8 is None:
            saved = [choose_copy(weight_copy, weight, x.dtype)]  # cast again in backward
            w8 = in_fp8.cast(saved[0].to(x.dtype), in_fp8.NARROW)
        ctx.save_for_backward(x8.columns, x8.scale, *saved)
        ctx.weight_8, ctx.x_shape, ctx.deferred, ctx.fused_grad = weight_8, x.shape, deferred, fused_grad
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        ctx.leaf = None if deferred is None else weight
        offset = None if bias is None else choose_copy(bias_copy, bias, x.dtype).to(x.dtype)
        y = in_fp8.multiply(x8.rows, w8.rows, (x8.scale, w8.scale), x.dtype, offset, fast=True)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, x_scale, *saved = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = dy.reshape(-1, dy.shape[-1])  # [rows, O]
        dy8, w8 = in_fp8.cast(rows, in_fp8.WIDE), ctx.weight_8
        dx = dw = None
        if needs_x:
            w8 = in_fp8.cast(saved[0].to(dy.dtype), in_fp8.NARROW) if w8 is None else w8
            dx = in_fp8.multiply(dy8.rows, w8.columns, (dy8.scale, w8.scale), dy.dtype).view(ctx.x_shape)
        weight_dtype, fused_grad, leaf = ctx.weight_dtype, ctx.fused_grad, ctx.leaf

        def weight_gradient() -> Tensor | None:
            dw = in_fp8.multiply(dy8.columns, x_columns, (dy8.scale, x_scale), weight_dtype)
            if fused_grad is None:
                return dw
            fused_grad.add_(dw)
            return None

        @torch.no_grad()
        def run() -> None:
            if (dw := weight_gradient()) is not None:
                torch.autograd.backward(leaf, dw)

        if needs_weight and ctx.deferred is not None and ctx.deferred.open:
            ctx.deferred.jobs.append(run)
        elif needs_weight:
            dw = weight_gradient()
        db = bias_gradient(rows, ctx.bias_dtype) if needs_bias else None
        return dx, dw, db, None, None, None, None, None


class _ColumnParallel(torch.autograd.Function):
    """Layers split by column with one input; `parameters` are all weights, then all biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        # unnamed: without gradients Dynamo drops ctx if arguments are as many as names
        tp, sequence_parallel, computes, *parameters = arguments
        weights, biases = parameters[: len(computes)], parameters[len(computes) :]
        first = computes[0]
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        ctx.deferred, ctx.fp8 = first.deferred, first.fp8
        # gradients of a pair use autograd
        ctx.fused_grad = first.fused_grad if len(computes) == 1 else None
        ctx.leaves = None if ctx.deferred is None else weights
        ctx.dtype = weights[0].dtype
        ctx.operands = _operands(computes)
        saved: list[Tensor] = []
        offsets: list[Tensor | None] = []
        for compute, w, b in zip(computes, weights, biases, strict=True):
            assert w is not None
            saved.append(choose_copy(compute.weight_copy, w, x.dtype))
            offsets.append(None if b is None else choose_copy(compute.bias_copy, b, x.dtype).to(x.dtype))
        factors = [w.to(x.dtype) for w in saved]
        ctx.save_for_backward(x, *saved)
        if sequence_parallel:
            parts = first.overlap_chunks
            return tuple(gathered_products(x, tp, factors, offsets, ctx.operands, ctx.fp8, parts))
        return tuple(multiply(x) for multiply in _products(factors, offsets, ctx.operands, ctx.fp8))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
        needs_bias = any(ctx.needs_input_grad[4 + len(weights) :])
        if needs_weights and ctx.deferred is not None and ctx.deferred.open:
            rows = [dy.reshape(-1, dy.shape[-1]) for dy in gradients]  # each [rows, O]
            _defer_weight_gradients(ctx, x, rows, gather_over=ctx.tp if ctx.sequence_parallel else None)
            needs_weights = False
        dx, *dws = column_gradients(
            x,
            ctx.tp,
            list(gradients),
            weights,
            ctx.operands,
            ctx.fused_grad,
            ctx.sequence_parallel,
            ctx.fp8,
            ctx.dtype,
            [needs_x, needs_weights, needs_bias],
        )
        returned = [needs_weights and ctx.fused_grad is None] * len(weights) + [needs_bias] * len(weights)
        results = [dws.pop(0) if is_returned else None for is_returned in returned]
        return dx if needs_x else None, None, None, None, *results


class _RowParallel(torch.autograd.Function):
    """x weight^T summed over tp, in parts; the sum of one overlaps the product of the next."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, tp: Axis, sequence_parallel: bool, compute: ComputeState
    ) -> Tensor:
        saved = choose_copy(compute.weight_copy, weight, x.dtype)
        ctx.save_for_backward(x, saved)
        ctx.weight_dtype, ctx.fused_grad = weight.dtype, compute.fused_grad
        ctx.fp8, ctx.operands = compute.fp8, _operands([compute])
        ctx.deferred, ctx.leaves = compute.deferred, None if compute.deferred is None else [weight]
        ctx.gather_over, ctx.parts = tp if sequence_parallel else None, compute.overlap_chunks
        return reduced_product(x, tp, saved.to(x.dtype), ctx.operands, ctx.fp8, sequence_parallel, ctx.parts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight = weight.to(dy.dtype)  # once for all parts
        if ctx.gather_over is None:
            dx = _input_gradient(dy, weight, ctx.fp8, _operand(ctx.operands, 0))
        else:  # keep the gathered gradient for the weight's gradient
            dy, dx = gathered_gradient(dy, ctx.gather_over, weight, ctx.operands, ctx.fp8, ctx.parts)
        rows, dw = dy.reshape(-1, dy.shape[-1]), None
        if ctx.needs_input_grad[1]:
            if ctx.deferred is not None and ctx.deferred.open:
                _defer_weight_gradients(ctx, x, [rows])
            else:
                dw = _weight_gradient(x, ctx.weight_dtype, ctx.fused_grad, rows, ctx.fp8)
        return dx, dw, None, None, None


def _operands(computes: Sequence[ComputeState]) -> list[Tensor]:
    """Return the cached 8-bit weights, three tensors each; empty unless all are cached."""
    cast = [compute.weight_8 for compute in computes if compute.weight_8 is not None]
    return [x for operand in cast for x in operand] if len(cast) == len(computes) else []


def _operand(operands: Sequence[Tensor], i: int) -> in_fp8.Operand | None:
    return in_fp8.Operand(*operands[3 * i : 3 * i + 3]) if operands else None


def _products(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], operands: Sequence[Tensor], fp8: bool
) -> list[Product]:
    terms: list[dict[str, Any]] = [{"weight": w, "bias": b} for w, b in zip(weights, biases, strict=True)]
    if not fp8:
        return [partial(product, **term) for term in terms]
    return [partial(in_fp8.product, **term, weight_8=_operand(operands, i)) for i, term in enumerate(terms)]


def _input_gradient(dy: Tensor, weight: Tensor, fp8: bool, weight_8: in_fp8.Operand | None) -> Tensor:
    weight = weight.to(dy.dtype)
    return in_fp8.input_gradient(dy, weight, weight_8) if fp8 else product(dy, weight.t())


def _weight_gradient(
    x: Tensor, dtype: torch.dtype, fused_grad: Tensor | None, dy: Tensor, fp8: bool
) -> Tensor | None:
    """Return the weight's gradient [O, I] from x […, I] and dy [rows, O]; None if added to `fused_grad`."""
    x = x.reshape(-1, x.shape[-1])
    if fused_grad is not None:
        add_weight_gradient(fused_grad, dy, x)
        return None
    return (in_fp8.weight_gradient if fp8 else weight_gradient)(dy, x, dtype)


def _defer_weight_gradients(
    ctx: Any, x: Tensor, gradients: Sequence[Tensor], gather_over: Axis | None = None
) -> None:
    """Defer the weights' gradients to a job, which gathers the rows of `x` over `gather_over`, if any."""
    weights, fused_grad, fp8 = ctx.leaves, ctx.fused_grad, ctx.fp8

    @torch.no_grad()
    def run() -> None:
        full = x if gather_over is None else gather_rows(x, gather_over)
        for weight, dy in zip(weights, gradients, strict=True):
            dw = _weight_gradient(full, weight.dtype, fused_grad, dy, fp8)
            if dw is not None:
                torch.autograd.backward(weight, dw)  # adds to .grad and runs hooks

    ctx.deferred.jobs.append(run)


def _gather_and_multiply(x: Tensor, tp: Axis, parts: int, products: Sequence[Product]) -> list[Tensor]:
    """Return products of the rows of all ranks, in parts: [S/t, B, I] -> [S, B, O] each.

    `x` are this rank's rows; `products` map a part's rows [S/k, B, I], k = `parts`, which divides S/t.
    """
    gathering = [start_all_gather(part, tp) for part in x.chunk(parts)]
    outputs: list[Tensor] = []
    for i, pending in enumerate(gathering):
        rows = pending.wait()  # [t, S/(tk), B, I]
        results = [product(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]) for product in products]
        if not outputs:
            outputs = [part.new_empty((tp.size, parts, *part.shape[1:])) for part in results]
        for full, part in zip(outputs, results, strict=True):
            full[:, i] = part
    return [full.flatten(0, 2) for full in outputs]


@traceable(
    "(Tensor x, str tp, Tensor[] weights, Tensor?[] biases, Tensor[] operands, bool fp8, int parts)"
    " -> Tensor[]",
    lambda x, tp, weights, *_: [
        x.new_empty((tp.size * x.shape[0], *x.shape[1:-1], w.shape[0])) for w in weights
    ],
)
def gathered_products(
    x: Tensor,
    tp: Axis,
    weights: list[Tensor],
    biases: list[Tensor | None],
    operands: list[Tensor],
    fp8: bool,
    parts: int,
) -> list[Tensor]:
    """Return products of the rows of all ranks: [S/t, B, I] -> [S, B, O] each."""
    products = _products(weights, biases, operands, fp8)
    if parts > 1 and x.shape[0] % parts == 0:
        return _gather_and_multiply(x, tp, parts, products)
    full = gather_rows(x, tp)
    return [multiply(full) for multiply in products]


def _column_gradient_shapes(
    x: Tensor, _: Axis, gradients: list[Tensor], weights: list[Tensor], *arguments: Any
) -> tuple[Tensor, ...]:
    _, fused_grad, _, _, dtype, (needs_x, needs_weights, needs_bias) = arguments
    dx = gradients[0].new_empty(x.shape if needs_x else 0)
    returned = weights if needs_weights and fused_grad is None else []
    dw = [w.new_empty(w.shape, dtype=dtype) for w in returned]
    dw += [w.new_empty(w.shape[0], dtype=dtype) for w in weights if needs_bias]
    return dx, *dw, *(x.new_empty(0) for _ in range(4 - len(dw)))


@traceable(
    "(Tensor x, str tp, Tensor[] gradients, Tensor[] weights, Tensor[] operands, Tensor(a!)? fused_grad,"
    " bool sequence_parallel, bool fp8, ScalarType dtype, bool[] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _column_gradient_shapes,
    changes=["fused_grad"],
)
def column_gradients(
    x: Tensor,
    tp: Axis,
    gradients: list[Tensor],
    weights: list[Tensor],
    operands: list[Tensor],
    fused_grad: Tensor | None,
    sequence_parallel: bool,
    fp8: bool,
    dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """Return dx, summed over tp, and dW and db of one or two layers; empty tensors where not needed.

    x is gathered while dx is computed, and dx is summed while dW and db are. dW may be added to `fused_grad`.
    """
    needs_x, needs_weights, needs_bias = needs
    gathering = start_all_gather(x, tp) if sequence_parallel and needs_weights else None
    dx, dw, summing = x.new_empty(0), [], None
    if needs_x:
        dx, *terms = (
            _input_gradient(dy, w, fp8, _operand(operands, i))
            for i, (dy, w) in enumerate(zip(gradients, weights, strict=True))
        )
        for term in terms:
            dx.add_(term)
        summing = (start_reduce_scatter if sequence_parallel else start_all_reduce)(dx, tp)
    rows = [dy.reshape(-1, dy.shape[-1]) for dy in gradients]
    if needs_weights:
        full = x if gathering is None else gathering.wait()
        dw += [_weight_gradient(full, dtype, fused_grad, dy, fp8) for dy in rows]
    dw += [bias_gradient(dy, dtype) for dy in rows if needs_bias]
    returned = [gradient for gradient in dw if gradient is not None]
    empty = (x.new_empty(0) for _ in range(4 - len(returned)))
    return dx if summing is None else summing.wait(), *returned, *empty


@traceable(
    "(Tensor x, str tp, Tensor weight, Tensor[] operands, bool fp8, bool scatters, int parts) -> Tensor",
    lambda x, tp, weight, _operands, _fp8, scatters, _parts: x.new_empty(
        (x.shape[0] // tp.size if scatters else x.shape[0], *x.shape[1:-1], weight.shape[0])
    ),
)
def reduced_product(
    x: Tensor, tp: Axis, weight: Tensor, operands: list[Tensor], fp8: bool, scatters: bool, parts: int
) -> Tensor:
    """Return the sum over tp of a product, or with `scatters` this rank's rows.

    [S, B, I/t] -> [S, B, O] or [S/t, B, O]; k divides S, or S/t.
    """
    (multiply,) = _products([weight], [None], operands, fp8)
    if scatters:
        rows = x.unflatten(0, (tp.size, parts, -1)).unbind(1)  # k of [t, S/(tk), B, I/t]
        pending = [start_reduce_scatter(multiply(part.flatten(0, 1)), tp) for part in rows]
    else:
        pending = [start_all_reduce(multiply(part), tp) for part in x.chunk(parts)]
    return torch.cat([part.wait() for part in pending])


@traceable(
    "(Tensor dy, str tp, Tensor weight, Tensor[] operands, bool fp8, int parts) -> Tensor[]",
    lambda dy, tp, weight, *_: [
        dy.new_empty((tp.size * dy.shape[0], *dy.shape[1:-1], size)) for size in weight.shape
    ],
)
def gathered_gradient(
    dy: Tensor, tp: Axis, weight: Tensor, operands: list[Tensor], fp8: bool, parts: int
) -> list[Tensor]:
    """Return the gradient of all rows and its product with the weight, [S, B, O] and [S, B, I]."""
    times_weight = partial(_input_gradient, weight=weight, fp8=fp8, weight_8=_operand(operands, 0))
    return _gather_and_multiply(dy, tp, parts, [lambda rows: rows, times_weight])
