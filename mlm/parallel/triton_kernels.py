"""Triton kernels for operations that take several passes in PyTorch; `matmul.kernels_for` loads them.

One program sums each token's rows in float32, in the order of its choices: results are deterministic.

Shapes: T tokens, k slots (choices) a token, R rows, H hidden, E experts, e of this rank,
F width of an expert, O outputs, I inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Columns of a row at a time."""
TILE, ROWS = 128, 64
"""Outputs and inputs of a tile of a weight's gradient, and rows multiplied at a time."""
CHOICES, CELLS = 512, 4096
"""Choices that a program sorts, and cells of its table of choices by experts."""


@triton.jit
def _sum_rows(x, rows, weights, out, hidden, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(rows + token * K + slot)
        value = tl.load(x + row * hidden + columns, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * K + slot)
        total += value
    tl.store(out + token * hidden + columns, total.to(out.dtype.element_ty), mask=inside)


def sum_rows(x: Tensor, rows: Tensor, per_token: int, weights: Tensor | None = None) -> Tensor:
    """Sum of each token's rows, times float32 weights [T, k] if any: [R, H], rows [T k] -> [T, H].

    Slots with a negative row are skipped.
    """
    x, tokens, hidden = x.contiguous(), len(rows) // per_token, x.shape[1]
    out = x.new_empty(tokens, hidden)
    block = min(BLOCK, triton.next_power_of_2(hidden))
    if tokens:
        factors = x if weights is None else weights.contiguous()
        grid = (tokens, triton.cdiv(hidden, block))
        _sum_rows[grid](x, rows, factors, out, hidden, per_token, weights is not None, block)
    return out


@triton.jit
def _combine_backward(d_out, y, weights, slots, dy, d_weights, hidden, per_token, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    weight, token = tl.load(weights + slot), slot // per_token
    dot = tl.zeros([BLOCK], tl.float32)
    for first in range(0, hidden, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < hidden
        gradient = tl.load(d_out + token * hidden + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dy + row * hidden + columns, (gradient * weight).to(dy.dtype.element_ty), mask=inside)
        dot += gradient * value
    tl.store(d_weights + slot, tl.sum(dot))


def combine_backward(d_out: Tensor, y: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weighted rows and of their weights: [T, H], [R, H], [T, k], [R] -> [R, H], [T, k]."""
    d_out, y, weights, hidden = d_out.contiguous(), y.contiguous(), weights.contiguous(), y.shape[1]
    dy, d_weights = torch.empty_like(y), torch.empty_like(weights)
    if len(y) < weights.numel():  # dropped choices
        d_weights.zero_()
    if len(y):
        block = min(BLOCK, triton.next_power_of_2(hidden))
        _combine_backward[(len(y),)](d_out, y, weights, slots, dy, d_weights, hidden, weights.shape[1], block)
    return dy, d_weights


@triton.jit
def _count_labels(labels, table, choices, CHOICES: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    choice = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES)
    label = tl.load(labels + choice, mask=choice < choices, other=0).to(tl.int32)
    counts = tl.histogram(label, PAD, mask=choice < choices)
    tl.store(table + tl.program_id(0) * PAD + tl.arange(0, PAD), counts)


@triton.jit
def _place_labels(  # type: ignore[no-untyped-def]
    labels,
    table,
    slots,
    tokens,
    rows,
    ends,
    choices,
    per_token,
    E,
    CHOICES: tl.constexpr,
    CHUNK: tl.constexpr,
    PAD: tl.constexpr,
):
    block, e = tl.program_id(0), tl.arange(0, PAD)[None, :]
    total, before = tl.zeros([PAD], tl.int32), tl.zeros([PAD], tl.int32)
    for first in range(0, tl.num_programs(0), CHUNK):
        b = first + tl.arange(0, CHUNK)[:, None]
        part = tl.load(table + b * PAD + e, mask=b < tl.num_programs(0), other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where(b < block, part, 0), 0)
    end = tl.cumsum(total, 0)
    tl.store(ends + tl.arange(0, PAD), end, mask=(tl.arange(0, PAD) < E) & (block == 0))
    following = end - total + before  # the next row of each label
    for first in range(0, CHOICES, CHUNK):
        choice = block * CHOICES + first + tl.arange(0, CHUNK)
        label = tl.load(labels + choice, mask=choice < choices, other=-1).to(tl.int32)
        is_label = (label[:, None] == e).to(tl.int32)
        row = tl.sum(is_label * (tl.cumsum(is_label, 0) - 1 + following[None, :]), 1)
        tl.store(slots + row, choice.to(tl.int64), mask=choice < choices)
        tl.store(tokens + row, (choice // per_token).to(tl.int64), mask=choice < choices)
        tl.store(rows + choice, tl.where(label < E, row, -1).to(tl.int64), mask=choice < choices)
        following += tl.sum(is_label, 0)


def sort_labels(labels: Tensor, num_experts: int, per_token: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort choices [T k] of E experts, or E, stably, by counts of blocks of them.

    Returns slots by their label, their tokens, the row of each slot, all [T k] int64, and the ends of the E
    runs, int32. Slots labelled E are last, and have row -1.
    """
    slots, tokens, rows = (torch.empty_like(labels) for _ in range(3))
    pad, blocks = max(16, triton.next_power_of_2(num_experts + 1)), max(1, triton.cdiv(len(labels), CHOICES))
    ends, table = (labels.new_empty(size, dtype=torch.int32) for size in (num_experts, blocks * pad))
    _count_labels[(blocks,)](labels, table, len(labels), CHOICES, pad)
    sizes = len(labels), per_token, num_experts, CHOICES, min(CHOICES, max(1, CELLS // pad)), pad
    _place_labels[(blocks,)](labels, table, slots, tokens, rows, ends, *sizes, num_warps=8)
    return slots, tokens, rows, ends


@triton.jit
def _gate(pairs, dy, out, width, limit, alpha, shift, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = 2 * row * width + c, c < width
    gate = tl.load(pairs + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pairs + at + width, mask=inside, other=0.0).to(tl.float32)
    g, u = tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, up)
    u = tl.where(u < -limit, -limit, u) + shift
    s = 1.0 / (1.0 + tl.exp(-alpha * g))
    if dy is None:
        tl.store(out + row * width + c, (g * s * u).to(out.dtype.element_ty), mask=inside)
    else:
        d = tl.load(dy + row * width + c, mask=inside, other=0.0).to(tl.float32)
        d_gate = tl.where(gate > limit, 0.0, d * u * s * (1.0 + alpha * g * (1.0 - s)))
        d_up = tl.where(tl.abs(up) > limit, 0.0, d * g * s)
        tl.store(out + at, d_gate.to(out.dtype.element_ty), mask=inside)
        tl.store(out + at + width, d_up.to(out.dtype.element_ty), mask=inside)


def gate(pairs: Tensor, dy: Tensor | None, limit: float, alpha: float, shift: float) -> Tensor:
    """(u + shift) g s(alpha g) of clamped [..., 2, F]: [..., F]; with `dy` the gradient of `pairs`."""
    pairs, width = pairs.contiguous(), pairs.shape[-1]
    out = torch.empty_like(pairs) if dy is not None else pairs.new_empty((*pairs.shape[:-2], width))
    rows, block = pairs.numel() // (2 * width), min(BLOCK, triton.next_power_of_2(width))
    if rows:
        gradient = None if dy is None else dy.contiguous()
        grid = (rows, triton.cdiv(width, block))
        _gate[grid](pairs, gradient, out, width, limit, alpha, shift, block)
    return out


@triton.jit
def _weight_gradients(dy, x, ends, dw, outputs, inputs, TILE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    expert, across = tl.program_id(1).to(tl.int64), tl.cdiv(inputs, TILE)
    o = (tl.program_id(0) // across) * TILE + tl.arange(0, TILE)
    i = (tl.program_id(0) % across) * TILE + tl.arange(0, TILE)
    begin, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    total = tl.zeros([TILE, TILE], tl.float32)
    for first in range(begin, end, ROWS):
        r = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        a = tl.load(dy + r * outputs + o[None, :], mask=(r < end) & (o[None, :] < outputs), other=0.0)
        b = tl.load(x + r * inputs + i[None, :], mask=(r < end) & (i[None, :] < inputs), other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    place = expert * outputs * inputs + o[:, None] * inputs + i[None, :]
    tl.store(dw + place, total, mask=(o[:, None] < outputs) & (i[None, :] < inputs))


def weight_gradients(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """dy^T x of each expert's rows, in float32: [R, O], [R, I], ends of the runs [e] -> [e, O, I]."""
    dy, x, outputs, inputs = dy.contiguous(), x.contiguous(), dy.shape[1], x.shape[1]
    dw = torch.empty(len(ends), outputs, inputs, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(outputs, TILE) * triton.cdiv(inputs, TILE), len(ends))
    _weight_gradients[grid](dy, x, ends, dw, outputs, inputs, TILE, ROWS, num_warps=8, num_stages=3)
    return dw


@triton.jit
def _cast_both(x, peak, rows, columns, scale, height, width, tiny, LIMIT: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    largest = tl.load(peak).to(tl.float32)
    factor = tl.div_rn(tl.maximum(largest, tiny, propagate_nan=tl.PropagateNan.ALL), LIMIT)
    r = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    c = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    inside = (r < height) & (c < width)
    value = tl.load(x + r * width + c, mask=inside, other=0.0).to(tl.float32)
    narrow = tl.div_rn(value, factor).to(rows.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(rows + r * width + c, narrow, mask=inside)
    tl.store(columns + c * height + r, narrow, mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, factor)


def cast_both(x: Tensor, dtype: torch.dtype, tiny: float) -> tuple[Tensor, Tensor, Tensor]:
    """Cast `x` [R, C] to an 8-bit format; return it, its transpose, and their float32 scale []."""
    x, (height, width) = x.contiguous(), x.shape
    peak = torch.linalg.vector_norm(x, float("inf"))
    rows = torch.empty(height, width, dtype=dtype, device=x.device)
    columns = torch.empty(width, height, dtype=dtype, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(height, ROWS), triton.cdiv(width, ROWS))
    _cast_both[grid](x, peak, rows, columns, scale, height, width, tiny, torch.finfo(dtype).max, ROWS)
    return rows, columns, scale
