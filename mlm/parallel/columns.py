"""Two layers split by column that read the same input: queries, and keys with values.

The input is gathered (with sequence parallelism) and its gradient summed once for both, as for one layer of
mlm/parallel/linear.py; they are apart because tensor-parallel ranks hold different parts of each.

Shapes: x [S, B, I] or [S/t, B, I], weight [O, I], y [S, B, O].
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlm.parallel import fp8 as in_fp8
from mlm.parallel.chunks import gathered_products
from mlm.parallel.collectives import gather_rows, start_all_gather, start_all_reduce, start_reduce_scatter
from mlm.parallel.compute_state import DeferredWeightGrads, usable
from mlm.parallel.layers import ColumnParallelLinear
from mlm.parallel.matmul import product, weight_gradient
from mlm.parallel.uncompiled import skip_compile


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layers: tuple[ColumnParallelLinear, ColumnParallelLinear],
        x: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:2], parameters[2:]
        first, compute = layers[0], layers[0].compute
        ctx.tp, ctx.sequence_parallel, ctx.fp8 = first.tp, first.sequence_parallel, compute.fp8
        ctx.deferred, ctx.leaves = compute.deferred, None if compute.deferred is None else weights
        casts = [usable(layer.compute.weight_copy, x.dtype) for layer in layers]
        used = [w if cast is None else cast for cast, w in zip(casts, weights, strict=True)]
        ctx.save_for_backward(x, *used)
        ctx.dtypes = [None if p is None else p.dtype for p in parameters]
        multiply = in_fp8.product if ctx.fp8 else product
        casts = [usable(layer.compute.bias_copy, x.dtype) for layer in layers]
        offsets = [b if cast is None else cast for cast, b in zip(casts, biases, strict=True)]
        products = [
            partial(multiply, weight=w.to(x.dtype), bias=None if b is None else b.to(x.dtype))
            for w, b in zip(used, offsets, strict=True)
            if w is not None
        ]
        chunks = compute.overlap_chunks
        if ctx.sequence_parallel and chunks > 1 and x.shape[0] % chunks == 0:
            return tuple(gathered_products(x, ctx.tp, chunks, products))
        whole = gather_rows(x, ctx.tp) if ctx.sequence_parallel else x
        return tuple(times(whole) for times in products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        tp, later = ctx.tp, ctx.deferred is not None and ctx.deferred.open
        needs_x, needs_weights = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
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
            _defer(ctx.deferred, x, ctx.leaves, rows, ctx)
        elif needs_weights:
            whole = x if gathering is None else gathering.wait()
            dw = list(_weight_gradients(whole, rows, ctx.dtypes, ctx.fp8))
        db = [
            dy.sum(0, dtype=dtype) if dtype is not None else None
            for dy, dtype in zip(rows, ctx.dtypes[2:], strict=True)
        ]
        return None, summing.wait() if summing is not None else None, *dw, *db


def _weight_gradients(
    x: Tensor, rows: list[Tensor], dtypes: list[torch.dtype], fp8: bool
) -> tuple[Tensor, ...]:
    gradient = in_fp8.weight_gradient if fp8 else weight_gradient
    x = x.reshape(-1, x.shape[-1])
    return tuple(gradient(dy, x, dtype) for dy, dtype in zip(rows, dtypes, strict=False))


def _defer(deferred: DeferredWeightGrads, x: Tensor, leaves: Any, rows: list[Tensor], ctx: Any) -> None:
    tp, sequence_parallel, dtypes, fp8 = ctx.tp, ctx.sequence_parallel, ctx.dtypes, ctx.fp8

    def run() -> None:
        whole = gather_rows(x, tp) if sequence_parallel else x
        # adds to .grad and runs the hooks that wait for it
        torch.autograd.backward(leaves, _weight_gradients(whole, rows, dtypes, fp8))

    deferred.add(run)


_apply = skip_compile(_Pair.apply)  # communication that is waited for later is not traced


def column_parallel_pair(
    x: Tensor, first: ColumnParallelLinear, second: ColumnParallelLinear
) -> tuple[Tensor, Tensor]:
    """Return the outputs of two layers of one input: [S, B, I] -> ([S, B, O1/t], [S, B, O2/t]).

    With sequence parallelism x holds this rank's rows of the sequence, [S/t, B, I].
    """
    if first.tp.size == 1:
        return first(x), second(x)
    y: tuple[Tensor, Tensor] = _apply(
        (first, second), x, first.weight, second.weight, first.bias, second.bias
    )
    return y
