"""Reference forward and backward passes of the fused attention kernels.

Masks of dropout are others than a GPU's, but functions of its generator's state as there: a kernel takes its
seed and offset, which backward passes get again.

Shapes: q [B, N, S, D], k and v [B, G, T, D], where G divides N; packed q [rows, N, D], k and v [rows, G, D].
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Heads = tuple[Tensor, Tensor, Tensor]
TAKEN = 4
"""Numbers that a kernel takes from the generator; its offset counts in fours."""


@dataclass(frozen=True)
class Dropout:
    """Masks of one call."""

    p: float
    seed: int
    offset: int

    @classmethod
    def drawn(cls, p: float) -> "Dropout":
        """Take the state of the current device's generator, where there is any dropout."""
        if p == 0:
            return cls(0.0, 0, 0)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        found = cls(p, generator.initial_seed(), generator.get_offset())
        generator.set_offset(found.offset + TAKEN)
        return found

    def factors(self, like: Tensor, part: int = 0) -> Tensor | float:
        """0 or 1 / (1 - p) for each of the probabilities of packed sequence `part`."""
        if self.p == 0:
            return 1.0
        generator = torch.Generator().manual_seed(hash((self.seed, self.offset, part)) % (1 << 63))
        kept = torch.rand(like.shape, generator=generator) >= self.p
        return kept.to(like.dtype) / (1 - self.p)

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """Seed and offset as the kernels return them."""
        return torch.tensor(self.seed), torch.tensor(self.offset)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """The same as flash attention does: both in one tensor, and one that nothing reads."""
        return torch.tensor([self.seed, self.offset]).view(torch.uint64), torch.tensor(0).view(torch.uint64)


NONE = Dropout(0.0, 0, 0)


def in_wide(x: Tensor) -> Tensor:
    """Float32, or float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def as_kernels_lie(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, N, S, D] with the strides that the kernels give: rows of all heads are neighbours."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def masked_scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """[B, N, S, T], -inf where a query does not attend."""
    scores = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores


def prepare(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor, float]:
    """Wide q, k, v with a key head for each query head, and the scale."""
    each = q.shape[1] // k.shape[1]
    wide_k, wide_v = (in_wide(x).repeat_interleave(each, 1) for x in (k, v))
    return in_wide(q), wide_k, wide_v, 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: Dropout = NONE,
    part: int = 0,
) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, D] and logsumexp [B, N, S]."""
    wide_q, wide_k, wide_v, scale = prepare(q, k, v, scale)
    scores = masked_scores(wide_q, wide_k, bias, causal, scale)
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp[..., None]).exp().nan_to_num(0)  # a row may see nothing
    return as_kernels_lie(weights * dropout.factors(weights, part) @ wide_v, q.dtype), logsumexp.float()


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: Dropout = NONE,
    part: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, and of the scores [B, N, S, T].

    `out` and `logsumexp` are used as they come, as kernels do: they may be those of more keys.
    """
    wide_q, wide_k, wide_v, scale = prepare(q, k, v, scale)
    dy, out = dy.to(wide_q.dtype), out.to(wide_q.dtype)
    weights = (masked_scores(wide_q, wide_k, bias, causal, scale) - logsumexp[..., None]).exp().nan_to_num(0)
    factors = dropout.factors(weights, part)
    dv = (weights * factors).transpose(-1, -2) @ dy
    d_weights = dy @ wide_v.transpose(-1, -2) * factors
    d_scores = weights * (d_weights - (dy * out).sum(-1, keepdim=True))
    dq, dk = d_scores @ wide_k * scale, d_scores.transpose(-1, -2) @ wide_q * scale
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return as_kernels_lie(dq, q.dtype), as_kernels_lie(dk, k.dtype), as_kernels_lie(dv, v.dtype), d_scores


def sequences(ends: Tensor, *packed: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Rows of each packed sequence, and its tensors as a batch of one: [rows, N, D] -> [1, N, S, D]."""
    limits = ends.tolist()
    for first, end in pairwise(limits):
        if end > first:
            yield slice(first, end), tuple(x[first:end].transpose(0, 1)[None] for x in packed)


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, causal: bool, scale: float | None, dropout: Dropout = NONE
) -> tuple[Tensor, Tensor]:
    """Output [rows, N, D] and logsumexp [N, rows] of sequences that end at `ends`."""
    out, logsumexp = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for rows, (one_q, one_k, one_v) in sequences(ends, q, k, v):
        y, sums = forward(one_q, one_k, one_v, None, causal, scale, dropout, rows.start)
        out[rows], logsumexp[:, rows] = y[0].transpose(0, 1), sums[0]
    return out, logsumexp


def packed_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    ends: Tensor,
    causal: bool,
    scale: float | None,
    dropout: Dropout = NONE,
) -> Heads:
    """Gradients of packed q, k and v."""
    found = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, ones in sequences(ends, dy, q, k, v, out):
        sums = logsumexp[None, :, rows]
        parts = backward(*ones, sums, None, causal, scale, dropout, rows.start)
        for whole, part in zip(found, parts, strict=False):
            whole[rows] = part[0].transpose(0, 1)
    return found


# Operators of PyTorch by these functions. They get tensors of the host.


def of_pair(p: float, state: Tensor) -> Dropout:
    """Masks of the state that flash attention returned."""
    if p == 0:
        return NONE
    seed, offset = state.view(torch.int64).tolist()
    return Dropout(p, seed, offset)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention."""
    masks = Dropout.drawn(dropout)
    out, logsumexp = forward(q, k, v, None, causal, scale, masks)
    return out, logsumexp, None, None, q.shape[2], k.shape[2], *masks.pair, q.new_empty(0)


def flash_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    ends_q: Any,
    ends_k: Any,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> Heads:
    """aten::_scaled_dot_product_flash_attention_backward."""
    return backward(dy, q, k, v, out, logsumexp, None, causal, scale, of_pair(dropout, seed))[:3]


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    wants_sums: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_efficient_attention."""
    masks = Dropout.drawn(dropout)
    return (*forward(q, k, v, bias, causal, scale, masks), *masks.state)


def efficient_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: list[bool],
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_efficient_attention_backward."""
    masks = Dropout(dropout, int(seed), int(offset))
    *heads, d_scores = backward(dy, q, k, v, out, logsumexp, bias, causal, scale, masks)
    return (
        *heads,
        d_scores.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and wanted[3] else None,
    )


def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    wants_sums: bool,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_cudnn_attention."""
    masks = Dropout.drawn(dropout)
    out, logsumexp = forward(q, k, v, bias, causal, scale, masks)
    return out, logsumexp, None, None, q.shape[2], k.shape[2], *masks.state, None


def cudnn_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    ends_q: Any,
    ends_k: Any,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    *,
    scale: float | None = None,
) -> Heads:
    """aten::_scaled_dot_product_cudnn_attention_backward."""
    masks = Dropout(dropout, int(seed), int(offset))
    return backward(dy, q, k, v, out, logsumexp, bias, causal, scale, masks)[:3]


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    **rest: Any,
) -> tuple[Any, ...]:
    """aten::_flash_attention_forward of packed sequences."""
    masks = Dropout.drawn(dropout)
    return (*packed_forward(q, k, v, ends_q, causal, scale, masks), *masks.pair, q.new_empty(0))


def varlen_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
    **rest: Any,
) -> Heads:
    """aten::_flash_attention_backward of packed sequences."""
    return packed_backward(dy, q, k, v, out, logsumexp, ends_q, causal, scale, of_pair(dropout, seed))


OPERATORS = {
    "_scaled_dot_product_flash_attention.default": flash,
    "_scaled_dot_product_flash_attention_backward.default": flash_backward,
    "_scaled_dot_product_efficient_attention.default": efficient,
    "_scaled_dot_product_efficient_attention_backward.default": efficient_backward,
    "_scaled_dot_product_cudnn_attention.default": cudnn,
    "_scaled_dot_product_cudnn_attention_backward.default": cudnn_backward,
    "_flash_attention_forward.default": varlen,
    "_flash_attention_backward.default": varlen_backward,
}
"""Name of an operator that only CUDA has → what computes it."""
