"""Causal self-attention with its heads split over the tensor-parallel ranks.

Shapes: S sequence, B micro-batch, H hidden, N heads, D head_dim, t = tensor-parallel size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlm.config.schema import ModelConfig
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.mesh import Axis
from mlm.parallel.random import DropoutStream, dropout


class SelfAttention(nn.Module):
    """Multi-head causal self-attention (arXiv:1909.08053, section 3, figure 3b).

    The rows of the fused qkv weight are ordered [head][q, k, v][head_dim]: a contiguous cut at any tp that
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
        self.layer, self.recompute = layer, recompute
        self.head_dim, self.dropout = config.head_dim, config.attention_dropout
        h, std = config.hidden_size, config.init_std
        out_std = std / math.sqrt(2 * config.num_layers)
        self.qkv = ColumnParallelLinear(h, 3 * h, tp=tp, sequence_parallel=sequence_parallel, init_std=std)
        self.out = RowParallelLinear(h, h, tp=tp, sequence_parallel=sequence_parallel, init_std=out_std)

    def forward(self, x: Tensor, stream: DropoutStream | None) -> Tensor:
        """[S, B, H] -> [S, B, H], or [S/t, B, H] with sequence parallelism; `stream` is None where there is
        no dropout (evaluation)."""
        qkv = self.qkv(x)  # [S, B, 3H/t]
        if stream is None or self.dropout == 0:
            return self.out(fused_attention(qkv, self.head_dim, 0.0))
        parts = zip(stream.split_parts, qkv.chunk(len(stream.split_parts), dim=-1), strict=True)
        results = [self._with_dropout(part, stream, rank) for rank, part in parts]
        return self.out(results[0] if len(results) == 1 else torch.cat(results, dim=-1))

    def _with_dropout(self, qkv: Tensor, stream: DropoutStream, rank: int) -> Tensor:
        """Attention with the dropout mask of one tp rank; on CPUs PyTorch has no fused kernel for it."""
        if qkv.device.type != "cpu":
            stream.enter(self.layer, "attention", rank)
            return fused_attention(qkv.contiguous(), self.head_dim, self.dropout)
        s, b, _ = qkv.shape
        heads = qkv.reshape(s, -1, 3, self.head_dim)  # [S, B * N/t, 3, D]
        q, k, v = heads.permute(2, 1, 0, 3).unbind(0)  # each [B * N/t, S, D], views

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            stream.enter(self.layer, "attention", rank)
            return unfused_attention(q, k, v, self.dropout)

        if self.recompute and torch.is_grad_enabled():
            # only here is anything of size S * S kept: fused kernels recompute it by themselves
            y = checkpoint(core, q, k, v, use_reentrant=False, preserve_rng_state=False)
        else:
            y = core(q, k, v)
        return y.transpose(0, 1).reshape(s, b, -1)


def fused_attention(qkv: Tensor, head_dim: int, p: float) -> Tensor:
    """Attention by PyTorch's best kernel: [S, B, 3H/t] -> [S, B, H/t]."""
    s, b, _ = qkv.shape
    q, k, v = qkv.view(s, b, -1, 3, head_dim).permute(3, 1, 2, 0, 4).unbind(0)  # each [B, N/t, S, D]
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)  # [B, N/t, S, D]
    return y.permute(2, 0, 1, 3).reshape(s, b, -1)


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with dropout on the probabilities: [heads, S, D] each -> [heads, S, D].

    Keeps five bytes per score in half precision for backward: probabilities, mask, and their product
    (arXiv:2205.05198, section 4.1).
    """
    s = q.shape[1]
    causal = torch.full((s, s), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    scores = torch.baddbmm(causal, q, k.transpose(1, 2), alpha=1 / math.sqrt(q.shape[-1]))  # [heads, S, S]
    return torch.bmm(dropout(torch.softmax(scores, -1), p), v)
