"""Self-attention with its heads split over the tensor-parallel ranks, causal where its family is.

Shapes: S sequence, B micro-batch, H hidden, N heads, D head_dim, t = tensor-parallel size.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlm.models.cache import Reading
from mlm.models.config import ModelConfig
from mlm.models.documents import Spans
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.mesh import Axis
from mlm.parallel.random import DropoutStream, dropout


class SelfAttention(nn.Module):
    """Multi-head self-attention (arXiv:1909.08053, section 3, figure 3b).

    The rows of the fused qkv weight are ordered [head][q, k, v][head_dim]: a contiguous split at any tp that
    divides num_heads gives whole heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer: int,
        tp: Axis,
        sequence_parallel: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if config.num_heads % tp.size:
            raise ValueError(f"num_heads={config.num_heads} must be divisible by tp={tp.size}")
        self.layer, self.recompute, self.causal = layer, recompute, config.family.causal
        self.head_dim, self.dropout = config.head_dim, config.attention_dropout
        h, std = config.hidden_size, config.init_std
        out_std = std / math.sqrt(2 * config.num_layers)
        self.qkv = ColumnParallelLinear(
            h, 3 * h, tp=tp, sequence_parallel=sequence_parallel, init_std=std, init_seed=None
        )
        self.out = RowParallelLinear(
            h, h, tp=tp, sequence_parallel=sequence_parallel, init_std=out_std, init_seed=None
        )

    def forward(
        self,
        x: Tensor,
        stream: DropoutStream | None,
        spans: Spans | None = None,
        reading: Reading | None = None,
    ) -> Tensor:
        """[S, B, H] -> [S, B, H], or [S/t, B, H] with sequence parallelism.

        `stream` is None without dropout (evaluation). With `spans` each document attends to itself alone, or
        no token to padding; with `reading` tokens attend to the cached ones of their sequences.
        """
        qkv = self.qkv(x)  # [S, B, 3H/t]: all of S, also with sequence parallelism
        if reading is not None:
            attended = reading.attend(self.layer, qkv, self.head_dim)
        elif stream is None or self.dropout == 0:
            attended = self._fused(qkv, 0.0, spans)
        else:
            parts = zip(stream.split_parts, qkv.chunk(len(stream.split_parts), dim=-1), strict=True)
            results = [self._with_dropout(part, stream, rank, spans) for rank, part in parts]
            attended = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        y: Tensor = self.out(attended)
        return y

    def _fused(self, qkv: Tensor, p: float, spans: Spans | None) -> Tensor:
        return self._inside(spans, partial(fused_attention, head_dim=self.head_dim, p=p), qkv)

    def _inside(self, spans: Spans | None, attention: Callable[..., Tensor], qkv: Tensor) -> Tensor:
        """`attention` to all tokens before (to all, if not causal) within each token's span."""
        if spans is None:
            return attention(qkv, causal=self.causal)
        if spans.bias is not None:
            return attention(qkv, bias=spans.bias, causal=False)
        y: Tensor = spans.each(partial(attention, causal=self.causal), qkv)
        return y

    def _with_dropout(self, qkv: Tensor, stream: DropoutStream, rank: int, spans: Spans | None) -> Tensor:
        """Attention with the dropout mask of one tp rank; on CPUs PyTorch has no fused kernel for it."""
        if qkv.device.type != "cpu":
            stream.enter(self.layer, "attention", rank)
            return self._fused(qkv.contiguous(), self.dropout, spans)

        def core(qkv: Tensor) -> Tensor:
            stream.enter(self.layer, "attention", rank)
            # one document after the other, so their masks too are functions of the micro-batch alone
            return self._inside(
                spans, partial(unfused_attention, head_dim=self.head_dim, p=self.dropout), qkv
            )

        if self.recompute and torch.is_grad_enabled():
            # only here is anything of size S * S kept: fused kernels recompute it by themselves
            y: Tensor = checkpoint(core, qkv, use_reentrant=False, preserve_rng_state=False)
            return y
        return core(qkv)


def fused_attention(
    qkv: Tensor, head_dim: int, p: float, bias: Tensor | None = None, causal: bool = True
) -> Tensor:
    """Attention by PyTorch's best kernel: [S, B, 3H/t] -> [S, B, H/t].

    Causal or not; `bias`, [B, 1, S, S] or [B, 1, 1, S], is added to the scores of what is not causal.
    """
    s, b, _ = qkv.shape
    q, k, v = qkv.view(s, b, -1, 3, head_dim).permute(3, 1, 2, 0, 4).unbind(0)  # each [B, N/t, S, D]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p, is_causal=causal)
    return y.permute(2, 0, 1, 3).reshape(s, b, -1)  # from [B, N/t, S, D]


def unfused_attention(
    qkv: Tensor, head_dim: int, p: float, bias: Tensor | None = None, causal: bool = True
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with dropout on the probabilities: [S, B, 3H/t] -> [S, B, H/t].

    Keeps five bytes per score in half precision for backward: probabilities, mask, and their product
    (arXiv:2205.05198, section 4.1). `bias` and `causal` as in `fused_attention`.
    """
    s, b, _ = qkv.shape
    heads = qkv.reshape(s, -1, 3, head_dim)  # [S, B * N/t, 3, D]
    q, k, v = heads.permute(2, 1, 0, 3).unbind(0)  # each [B * N/t, S, D], views
    if causal:
        added = torch.full((s, s), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    elif bias is not None:  # a sequence's heads are adjacent
        added = bias.expand(b, heads.shape[1] // b, -1, s).flatten(0, 1)  # [B * N/t, 1 or S, S]
    else:
        added = q.new_zeros(())
    scores = torch.baddbmm(added, q, k.transpose(1, 2), alpha=1 / math.sqrt(head_dim))  # [B * N/t, S, S]
    y = torch.bmm(dropout(torch.softmax(scores, -1), p), v)  # [B * N/t, S, D]
    return y.transpose(0, 1).reshape(s, b, -1)
