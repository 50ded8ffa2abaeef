"""Attention of sequences of several lengths in one flash kernel: tokens packed one after the other.

A bias on the scores that hides padding, or other documents, forbids flash kernels. Here the tokens that count
are gathered, sequence by sequence, and the kernel is given where each begins: it computes the squares of the
lengths rather than of S, and padding goes through no kernel. Gathering and putting back move 18 bytes for
each element of H and token forward, and 22 backward, in half precision.

Shapes: S sequence, B micro-batch, H hidden, N heads, D head_dim, t = tensor-parallel size, T tokens that
count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mlm.parallel.transfer import to_device
from mlm.parallel.uncompiled import skip_compile

_switch: list[bool] = []


@dataclass(frozen=True, eq=False)
class Packing:
    """Places of the sequences of a micro-batch, packed."""

    rows: Tensor
    """int64 [T]: rows of the flattened [S * B, ...], sequence by sequence; each once."""
    begins: Tensor
    """int32 [sequences + 1]: the first packed token of each sequence, and T."""
    longest: int
    """Tokens of the longest."""


def pack_sequences(on: bool) -> None:
    """Let the spans of this process be packed, or not: a choice of kernels, as in mlm/training/kernels.py."""
    _switch[:] = [True] if on else []


def packs(device: torch.device) -> bool:
    """True if spans are packed on a device."""
    return bool(_switch) and device.type == "cuda"


def build_packing(lengths: Sequence[Sequence[int]], device: torch.device) -> Packing:
    """Packing of sequences one after the other in each sample; what follows the last is padding.

    `lengths` has those of each of the B samples.
    """
    samples = len(lengths)
    rows = [torch.arange(sum(each)) * samples + b for b, each in enumerate(lengths)]  # row s * B + b
    flat = [length for each in lengths for length in each]
    begins = torch.tensor([0, *accumulate(flat)], dtype=torch.int32)
    return Packing(to_device(torch.cat(rows), device), to_device(begins, device), max(flat))


class _Take(torch.autograd.Function):
    """Some rows of a matrix, each once; the gradient of the others is zero."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(x)  # type: ignore[attr-defined]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return dy.new_zeros(ctx.size, dy.shape[1]).index_copy_(0, rows, dy), None  # type: ignore[attr-defined]


class _Put(torch.autograd.Function):
    """The reverse: rows of a matrix of zeros."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, rows: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(rows)
        return x.new_zeros(size, x.shape[1]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return dy.index_select(0, rows), None, None


@skip_compile  # the number of tokens differs from batch to batch: each would be compiled anew
def packed_attention(qkv: Tensor, head_dim: int, packing: Packing, causal: bool) -> Tensor:
    """Attention within each packed sequence: [S, B, 3H/t] -> [S, B, H/t], 0 for padding."""
    from torch.nn.attention.varlen import varlen_attn  # loads the kernels' registration

    s, b, _ = qkv.shape
    tokens: Tensor = _Take.apply(qkv.view(s * b, -1), packing.rows)  # type: ignore[no-untyped-call]
    q, k, v = tokens.view(len(packing.rows), -1, 3, head_dim).unbind(2)  # each [T, N/t, D]
    y = varlen_attn(
        q,
        k,
        v,
        packing.begins,
        packing.begins,
        packing.longest,
        packing.longest,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    assert isinstance(y, Tensor)  # no auxiliary results were asked for
    whole: Tensor = _Put.apply(y.flatten(1), packing.rows, s * b)  # type: ignore[no-untyped-call]
    return whole.view(s, b, -1)
