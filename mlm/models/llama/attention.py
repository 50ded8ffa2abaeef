"""Grouped-query attention with rotary positions, its heads split over the tensor-parallel ranks.

Shapes: S sequence, B micro-batch, H hidden, N heads, K heads of keys and values, D head_dim, t =
tensor-parallel size. This rank has n = N/t and k = K/t heads; if K < t, t/K ranks hold each head.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.models.attention import SelfAttention
from mlm.models.blocked_attention import (
    HeadLayout,
    causal_attention_in_blocks,
    generated_attention,
    uses_blocks,
    uses_generated_kernel,
    uses_windowed_flash,
    windowed_flash_attention,
)
from mlm.models.cache import (
    PrefillPass,
    Reading,
    causal_attention,
    merge_heads,
    unfused_attention,
    window_mask,
)
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import LlamaSettings
from mlm.models.norms import RMSNorm
from mlm.models.rotary import Rotary
from mlm.parallel.collectives import copy_to_tp, reduce_from_tp
from mlm.parallel.compute_state import skip_compile
from mlm.parallel.context import context_attention, fused_kernel
from mlm.parallel.layers import ColumnParallelLinear, FusedRows
from mlm.parallel.linear import column_parallel_pair
from mlm.parallel.mesh import Axis


class HeadNorm(RMSNorm):
    """RMSNorm of each head with one shared weight, whose gradient is summed over tp."""

    is_partial = True


class AllHeadsNorm(RMSNorm):
    """RMSNorm over all heads together; this rank holds n or k of them, each on `replicas` ranks."""

    tp_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, size: int, *, eps: float, replicas: int = 1) -> None:
        super().__init__(size, eps=eps)
        self.replicas = replicas

    def sum_squares(self, x: Tensor) -> Tensor:
        """This rank's term of the sum over all heads: [..., size] -> [..., 1], at least float32."""
        x32 = x if x.dtype == torch.float64 else x.float()
        return x32.square().sum(-1, keepdim=True) / self.replicas

    def apply_sum(self, x: Tensor, squares: Tensor, tp: Axis) -> Tensor:
        """Norm x [..., size] by the sum of squares over all heads, [..., 1]."""
        assert self.eps is not None
        width = x.shape[-1] * tp.size // self.replicas
        y = x.to(squares.dtype) * torch.rsqrt(squares / width + self.eps)
        return (y * self.weight).to(x.dtype)


class SinkLogits(nn.Module):
    """Attention-sink logit of each head of this rank: a key without a value."""

    tp_dims: ClassVar[dict[str, int]] = {"bias": 0}

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads))


class GroupedQueryAttention(SelfAttention):
    """Attention whose queries share heads of keys and values (arXiv:2305.13245).

    Rows of the weight of queries are ordered `[head][head_dim]`, rows of keys and values
    `[kv head][k, v][head_dim]`: a contiguous split at any tp that divides N gives whole heads, and beyond K
    ranks t/K neighbours, whose queries share a head of keys and values, hold the same one.
    """

    def _add_projections(self, config: ModelConfig, sequence_parallel: bool) -> None:
        settings, tp = LlamaSettings.of(config), self.tp
        self.has_rotary = settings.is_rotary(self.layer)
        self.is_sliding = settings.window_rope_theta > 0 and self.scores.window > 0
        heads, kv_heads = config.num_heads, settings.num_kv_heads
        if kv_heads % tp.size and tp.size % kv_heads:
            raise ValueError(f"of num_kv_heads={kv_heads} and tp={tp.size} one must divide the other")
        self.kv_heads = max(1, kv_heads // tp.size)
        linear = partial(
            ColumnParallelLinear,
            config.hidden_size,
            tp=tp,
            sequence_parallel=sequence_parallel,
            init_std=config.hidden_std,
            init_seed=None,
            bias=settings.qkv_bias,
        )
        self.query = linear(heads * self.head_dim)
        self.kv = linear(2 * kv_heads * self.head_dim, replicas=max(1, tp.size // kv_heads))
        self.query.fused_rows = FusedRows(1, self.head_dim, are_heads=True)
        self.kv.fused_rows = FusedRows(2, self.head_dim, are_heads=True)
        self.sinks = SinkLogits(heads // tp.size) if settings.attention_sinks else None
        self.query_norm: HeadNorm | AllHeadsNorm | None = None
        self.key_norm: HeadNorm | AllHeadsNorm | None = None
        eps, replicas = config.layer_norm_eps, self.kv.replicas
        if settings.qk_norm_whole:
            self.query_norm = AllHeadsNorm(heads // tp.size * self.head_dim, eps=eps)
            self.key_norm = AllHeadsNorm(self.kv_heads * self.head_dim, eps=eps, replicas=replicas)
        elif settings.qk_norm:
            self.query_norm = HeadNorm(self.head_dim, eps=eps, zero_centered=settings.zero_centered_norms)
            self.key_norm = HeadNorm(self.head_dim, eps=eps, zero_centered=settings.zero_centered_norms)

    @property
    def sink_logits(self) -> Tensor | None:
        return None if self.sinks is None else self.sinks.bias

    def project(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """Queries and keys, rotated, and values: [S, B, (n + 2k) D], ordered [q | k | v]."""
        q, kv = column_parallel_pair(
            x,
            (self.query.weight, self.kv.weight),
            (self.query.bias, self.kv.bias),
            self.tp,
            sequence_parallel=self.query.sequence_parallel,
            computes=(self.query.compute, self.kv.compute),
        )
        return self.join(self.query.add_adapter_output(q, x), self.kv.add_adapter_output(kv, x), rotary)

    def join(self, q: Tensor, kv: Tensor, rotary: Rotary | None) -> Tensor:
        """Norm and rotate products of heads, all of this rank's or a part: the result of `project`."""
        q = q.unflatten(-1, (-1, self.head_dim))  # [S, B, n, D]
        k, v = kv.unflatten(-1, (-1, 2, self.head_dim)).unbind(3)  # each [S, B, k, D]
        match self.query_norm, self.key_norm:
            case AllHeadsNorm() as query_norm, AllHeadsNorm() as key_norm:
                q, k = q.flatten(2), k.flatten(2)
                if self.tp.size == 1:
                    q, k = query_norm(q), key_norm(k)
                else:
                    squares = torch.cat([query_norm.sum_squares(q), key_norm.sum_squares(k)], -1)
                    # g, then f: every rank's output depends on the sum, so its gradient is summed over tp
                    q_squares, k_squares = copy_to_tp(reduce_from_tp(squares, self.tp), self.tp).split(1, -1)
                    q = query_norm.apply_sum(q, q_squares, self.tp)
                    k = key_norm.apply_sum(k, k_squares, self.tp)
                q, k = q.unflatten(-1, (-1, self.head_dim)), k.unflatten(-1, (-1, self.head_dim))
            case HeadNorm() as query_norm, HeadNorm() as key_norm:
                q, k = query_norm(q), key_norm(k)
        if self.has_rotary:
            assert rotary is not None
            angles = rotary.sliding if self.is_sliding and rotary.sliding is not None else rotary
            q, k = angles.rotate(q), angles.rotate(k)
        return torch.cat([q, k, v], dim=2).flatten(2)

    def attend_cached(self, x: Tensor, rotary: Rotary | None, reading: Reading) -> Tensor:
        qkv, sinks = self.project(x, rotary), self.sink_logits
        q, k, v = self.heads(qkv)
        if not isinstance(reading, PrefillPass):
            return reading.attend(self.layer, q, k, v, self.scores, sinks)
        if not self.scores.softcap and sinks is None:
            return reading.attend(self.layer, q, k, v, self.scores)
        reading.keep(self.layer, k, v)
        return self.fused(qkv, 0.0, None, True)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, n, S, D], keys and values [B, k, S, D]."""
        heads = qkv.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)  # [B, n + 2k, S, D]
        count = heads.shape[1]
        kv = self._kv_heads(count)
        q, k, v = heads.split([count - 2 * kv, kv, kv], dim=1)
        return q, k, v

    def _kv_heads(self, count: int) -> int:
        """Heads of keys among the `count` = n + 2k of a rank, or of a part of one."""
        full = self.query.weight.shape[0] // self.head_dim + 2 * self.kv_heads
        return max(1, self.kv_heads * count // full)

    def parts(self, qkv: Tensor, count: int) -> tuple[Tensor, ...]:
        """Split `project` into the shares of `count` tp ranks."""
        q, k, v = self.heads(qkv)
        kv, parts = max(1, k.shape[1] // count), []
        for part, queries in enumerate(q.chunk(count, dim=1)):
            first = part * k.shape[1] // count
            shared = slice(first, first + kv)
            parts.append(merge_heads(torch.cat([queries, k[:, shared], v[:, shared]], dim=1)))
        return tuple(parts)

    def fused(self, qkv: Tensor, p: float, bias: Tensor | None, causal: bool) -> Tensor:
        """Attention by PyTorch's best kernel: [S, B, (n + 2k) D] -> [S, B, n D]."""
        sinks = self.sink_logits
        if bias is None and p == 0:
            if sinks is None and uses_windowed_flash(qkv, self.head_dim, self.scores):
                return windowed_flash_attention(*self.heads(qkv), self.scores)
            if sinks is None and uses_generated_kernel(qkv, self.head_dim, self.scores):
                return generated_attention(*self.heads(qkv), self.scores)
            if uses_blocks(qkv, self.scores):
                return self._in_blocks(qkv)
            if sinks is not None:
                return self._with_sinks(qkv, sinks)
        if self.scores.softcap or sinks is not None:
            return self.unfused(qkv, partial(F.dropout, p=p), bias, causal)
        q, k, v = self.heads(qkv)
        if qkv.is_cpu:  # its kernel reads strided rows a tenth slower
            k, v = k.contiguous(), v.contiguous()
        if bias is None:
            return merge_heads(causal_attention(q, k, v, self.scores, p=p))
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self._windowed(bias),
            dropout_p=p,
            enable_gqa=q.shape[1] != k.shape[1],
            scale=self.scores.scale,
        )
        return merge_heads(y)

    def _in_blocks(self, qkv: Tensor) -> Tensor:
        x = qkv.unflatten(-1, (-1, self.head_dim))
        kv = self._kv_heads(x.shape[2])
        first = x.shape[2] - 2 * kv
        layout = HeadLayout(slice(first), slice(first, first + kv), slice(first + kv, None))
        return causal_attention_in_blocks(x, layout, self.scores, self.sink_logits)

    @skip_compile
    def _with_sinks(self, qkv: Tensor, sinks: Tensor) -> Tensor:
        """Attention by a kernel that returns log-sum-exps, or in blocks."""
        q, k, v = self.heads(qkv)
        if fused_kernel(q, self.scores) is None:
            return self._in_blocks(qkv)
        return merge_heads(context_attention(q, k, v, Axis("cp"), scores=self.scores, sinks=sinks))

    def _windowed(self, bias: Tensor) -> Tensor:
        """`bias` [B, 1, S, S], with -inf outside the window too."""
        length = bias.shape[-1]
        if not self.scores.hides(length):
            return bias
        return bias.masked_fill(~window_mask(length, self.scores.window, bias.device), -math.inf)

    def unfused(
        self, qkv: Tensor, drop: Callable[[Tensor], Tensor], bias: Tensor | None, causal: bool
    ) -> Tensor:
        """drop(softmax(scores)) v, keys and values repeated for their queries."""
        q, k, v = self.heads(qkv)
        s = len(qkv)
        if bias is None:
            hidden = ~window_mask(s, self.scores.window or s, q.device)
            added = torch.zeros(s, s, dtype=q.dtype, device=q.device).masked_fill_(hidden, -math.inf)
        else:
            added = self._windowed(bias)
        return merge_heads(unfused_attention(q, k, v, self.scores, added, self.sink_logits, drop))
