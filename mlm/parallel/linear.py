"""The differentiable linear map of all layers, with what tensor parallelism does around it.

Parameters may be kept in float32 while activations are bfloat16 or float16: the weight is cast to the
activations' dtype, by the caller or for each product, and its gradient comes back in the weight's dtype, so
master weights, gradient accumulation and reduction stay in float32.

Where the layer is split by column, the input's gradient is summed over tp (operator f). Here that sum is
under way while the weight's gradient is computed. With sequence parallelism the input is gathered along S
before the product, and again in backward rather than kept, while the input's gradient is computed
(arXiv:2205.05198, section 4.2.2).

Gathers before a product and sums after it have nothing to overlap with, unless they are communicated in k
parts of the sequence (`overlap_chunks`), each during the product of another. Only the first gather and the
last sum are then waited for. Where ranks hold different rows, a part is of the rows of each.

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
from mlm.parallel.compute_state import ComputeState, DeferredWeightGrads, choose_copy, skip_compile
from mlm.parallel.matmul import add_weight_gradient, bias_gradient, product, uses_onednn, weight_gradient
from mlm.parallel.mesh import Axis

DEFAULT_COMPUTE = ComputeState()
"""Of a product on its own: nothing is deferred, fused or cast before."""
Product = Callable[[Tensor], Tensor]
"""[…, I] -> […, O], each row for itself."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, compute: ComputeState = DEFAULT_COMPUTE
) -> Tensor:
    """Return x weight^T + bias, differentiable; weight and bias may be of a wider dtype than x.

    With `compute.fused_grad` backward adds the weight's gradient to it, past autograd: no hook of the weight
    hears of it.
    """
    is_plain = compute.is_plain and x.dtype == weight.dtype and not uses_onednn(x, weight)
    if is_plain and x.is_contiguous():  # of another PyTorch would keep a copy
        return F.linear(x, weight, bias)  # the same products; a custom node takes as long as a small one
    apply: Callable[..., Tensor] = _Linear.apply if compute.deferred is None else _eager_linear
    copies = compute.weight_copy, None if bias is None else compute.bias_copy
    if compute.fp8 and in_fp8.fits(x.numel() // x.shape[-1], *weight.shape):
        apply = _Fp8Linear.apply if compute.deferred is None else _eager_fp8_linear
        return apply(x, weight, bias, *copies, compute.weight_8, compute.deferred, compute.fused_grad)
    return apply(x, weight, bias, *copies, compute.deferred, compute.fused_grad)


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
    summed over tp. It is gathered and multiplied in `compute.overlap_chunks`, or at once if they do not
    divide its rows.
    """
    if tp.size == 1:
        return linear(x, weight, bias, compute)
    if torch.compiler.is_compiling() and not sequence_parallel and compute.deferred is None:
        return linear(copy_to_tp(x, tp), weight, bias, compute)
    return _eager_column_parallel(x, tp, sequence_parallel, (compute,), weight, bias)[0]


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

    The input is gathered once, as its gradient is summed once. The layers are apart because tensor-parallel
    ranks hold different parts of each.
    """
    if tp.size == 1:
        first, second = map(partial(linear, x), weights, biases, computes)
    else:
        first, second = _eager_column_parallel(x, tp, sequence_parallel, computes, *weights, *biases)
    return first, second


def row_parallel_linear(
    x: Tensor, weight: Tensor, tp: Axis, *, sequence_parallel: bool = False, compute: ComputeState
) -> Tensor:
    """Sum over tp of the products of a layer split by row, in chunks: [S, B, I/t] -> [S, B, O].

    With `sequence_parallel` this rank's rows of it, [S/t, B, O]. `compute.overlap_chunks` must divide them.
    """
    return _eager_row_parallel(x, weight, tp, sequence_parallel, compute)


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
        # the weight as it is kept: a cast of our own is cheaper made twice than saved
        saved = choose_copy(weight_copy, weight, x.dtype)
        ctx.save_for_backward(x, saved)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        ctx.deferred, ctx.fp8, ctx.fused_grad = deferred, False, fused_grad
        # recomputation hands a placeholder of the saved weight to backward, whose gradient would be lost
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
    """`_Linear` of 8-bit operands, each cast once: x and dy for two products each, weights for a step."""

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
            saved = [choose_copy(weight_copy, weight, x.dtype)]  # cast again in backward, not kept
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
    """Layers split by column of one input; `parameters` are all weights, then all biases."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: Axis,
        sequence_parallel: bool,
        computes: tuple[ComputeState, ...],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(computes)], parameters[len(computes) :]
        first = computes[0]
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        ctx.deferred, ctx.fp8 = first.deferred, first.fp8
        # a pair's gradients go through autograd
        ctx.fused_grad = first.fused_grad if len(computes) == 1 else None
        ctx.leaves = None if ctx.deferred is None else weights
        ctx.dtypes = [None if p is None else p.dtype for p in parameters]
        ctx.weights_8 = [compute.weight_8 for compute in computes]
        saved, products = list[Tensor](), list[Product]()
        for compute, w, b in zip(computes, weights, biases, strict=True):
            assert w is not None
            saved.append(choose_copy(compute.weight_copy, w, x.dtype))
            offset = None if b is None else choose_copy(compute.bias_copy, b, x.dtype).to(x.dtype)
            products.append(_product_with(saved[-1].to(x.dtype), compute, offset))
        ctx.save_for_backward(x, *saved)
        parts = first.overlap_chunks
        if sequence_parallel and parts > 1 and x.shape[0] % parts == 0:
            return tuple(gathered_products(x, tp, parts, products))
        full = gather_rows(x, tp) if sequence_parallel else x
        return tuple(multiplied(full) for multiplied in products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        tp, count = ctx.tp, len(weights)
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
        defers = ctx.deferred is not None and ctx.deferred.open
        gathers = ctx.sequence_parallel and needs_weights and not defers
        gathering = start_all_gather(x, tp) if gathers else None
        summing = None
        if needs_x:
            dx, *others = (
                _input_gradient(dy, w, ctx.fp8, w8)
                for dy, w, w8 in zip(gradients, weights, ctx.weights_8, strict=True)
            )
            for other in others:
                dx.add_(other)
            summing = (start_reduce_scatter if ctx.sequence_parallel else start_all_reduce)(dx, tp)
        rows = [dy.reshape(-1, dy.shape[-1]) for dy in gradients]  # each [rows, O]
        dw: list[Tensor | None] = [None] * count
        if needs_weights and defers:
            _defer_weight_gradients(ctx, x, rows, gather_over=tp if ctx.sequence_parallel else None)
        elif needs_weights:
            full = x if gathering is None else gathering.wait()
            for i, dy in enumerate(rows):
                dw[i] = _weight_gradient(full, ctx.dtypes[i], ctx.fused_grad, dy, ctx.fp8)
        needs_biases = ctx.needs_input_grad[4 + count :]
        db = [
            bias_gradient(dy, dtype) if needs_bias else None
            for dy, dtype, needs_bias in zip(rows, ctx.dtypes[count:], needs_biases, strict=True)
        ]
        return None if summing is None else summing.wait(), None, None, None, *dw, *db


class _RowParallel(torch.autograd.Function):
    """x weight^T summed over tp, in parts whose sums are under way while the next is multiplied."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, tp: Axis, sequence_parallel: bool, compute: ComputeState
    ) -> Tensor:
        saved = choose_copy(compute.weight_copy, weight, x.dtype)
        ctx.save_for_backward(x, saved)
        ctx.weight_dtype, ctx.fused_grad = weight.dtype, compute.fused_grad
        ctx.fp8, ctx.weight_8 = compute.fp8, compute.weight_8
        ctx.deferred, ctx.leaves = compute.deferred, None if compute.deferred is None else [weight]
        ctx.gather_over, ctx.parts = tp if sequence_parallel else None, compute.overlap_chunks
        reduce_product = scattered_product if sequence_parallel else summed_product
        return reduce_product(x, tp, ctx.parts, _product_with(saved.to(x.dtype), compute))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight = weight.to(dy.dtype)
        times_weight = partial(_input_gradient, weight=weight, fp8=ctx.fp8, weight_8=ctx.weight_8)
        if ctx.gather_over is None:
            dx = times_weight(dy)
        else:  # the gathered gradient is kept: the weight's gradient is a product with all of it
            dy, dx = gathered_products(dy, ctx.gather_over, ctx.parts, [lambda rows: rows, times_weight])
        rows, dw = dy.reshape(-1, dy.shape[-1]), None
        if ctx.needs_input_grad[1]:
            if ctx.deferred is not None and ctx.deferred.open:
                _defer_weight_gradients(ctx, x, [rows])
            else:
                dw = _weight_gradient(x, ctx.weight_dtype, ctx.fused_grad, rows, ctx.fp8)
        return dx, dw, None, None, None


_eager_linear: Callable[..., Tensor] = skip_compile(_Linear.apply)
"""torch.compile traces neither communication that is waited for later nor deferred products."""
_eager_fp8_linear: Callable[..., Tensor] = skip_compile(_Fp8Linear.apply)
_eager_column_parallel: Callable[..., tuple[Tensor, ...]] = skip_compile(_ColumnParallel.apply)
_eager_row_parallel: Callable[..., Tensor] = skip_compile(_RowParallel.apply)


def _product_with(weight: Tensor, compute: ComputeState, bias: Tensor | None = None) -> Product:
    if compute.fp8:
        return partial(in_fp8.product, weight=weight, bias=bias, weight_8=compute.weight_8)
    return partial(product, weight=weight, bias=bias)


def _input_gradient(dy: Tensor, weight: Tensor, fp8: bool, weight_8: in_fp8.Operand | None) -> Tensor:
    weight = weight.to(dy.dtype)
    return in_fp8.input_gradient(dy, weight, weight_8) if fp8 else product(dy, weight.t())


def _weight_gradient(
    x: Tensor, dtype: torch.dtype, fused_grad: Tensor | None, dy: Tensor, fp8: bool
) -> Tensor | None:
    """Return the weight's gradient [O, I], from x […, I] and dy [rows, O]; None if it was added to a sum."""
    x = x.reshape(-1, x.shape[-1])
    if fused_grad is not None:
        add_weight_gradient(fused_grad, dy, x)
        return None
    return (in_fp8.weight_gradient if fp8 else weight_gradient)(dy, x, dtype)


def _defer_weight_gradients(
    ctx: Any, x: Tensor, gradients: Sequence[Tensor], gather_over: Axis | None = None
) -> None:
    """Leave the weights' gradients to a job, which gathers the rows of `x` again where ranks have parts."""
    weights, fused_grad, fp8 = ctx.leaves, ctx.fused_grad, ctx.fp8

    @torch.no_grad()
    def run() -> None:
        full = x if gather_over is None else gather_rows(x, gather_over)
        for weight, dy in zip(weights, gradients, strict=True):
            dw = _weight_gradient(full, weight.dtype, fused_grad, dy, fp8)
            if dw is not None:
                torch.autograd.backward(weight, dw)  # adds to .grad and runs the hooks that wait for it

    ctx.deferred.jobs.append(run)


def gathered_products(x: Tensor, tp: Axis, parts: int, products: Sequence[Product]) -> list[Tensor]:
    """Return products of the rows of all ranks: [S/t, B, I] -> [S, B, O] each.

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


def scattered_product(x: Tensor, tp: Axis, parts: int, product: Product) -> Tensor:
    """Return this rank's rows of the sum over tp: [S, B, I/t] -> [S/t, B, O]. tk must divide S."""
    rows = x.unflatten(0, (tp.size, parts, -1))  # [t, k, S/(tk), B, I/t]
    pending = [start_reduce_scatter(product(rows[:, i].flatten(0, 1)), tp) for i in range(parts)]
    return torch.cat([each.wait() for each in pending])


def summed_product(x: Tensor, tp: Axis, parts: int, product: Product) -> Tensor:
    """Return the sum over tp: [S, B, I/t] -> [S, B, O]. k must divide S."""
    pending = [start_all_reduce(product(part), tp) for part in x.chunk(parts)]
    return torch.cat([each.wait() for each in pending])
