"""Causal self-attention with its heads split over the tensor-parallel ranks.

Shapes: S sequence, B micro-batch, H hidden, N heads, D head_dim, t = tensor-parallel size.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from mlm.config.schema import ModelConfig
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.mesh import Axis
from mlm.parallel.random import DropoutStream


class SelfAttention(nn.Module):
    """Multi-head causal self-attention (arXiv:1909.08053, section 3, figure 3b).

    The rows of the fused qkv weight are ordered [head][q, k, v][head_dim]: a contiguous cut at any tp that
    divides num_heads gives whole heads.
    """

    def __init__(self, config: ModelConfig, *, layer: int, tp: Axis) -> None:
        super().__init__()
        if config.num_heads % tp.size:
            raise ValueError(f"num_heads={config.num_heads} must be divisible by tp={tp.size}")
        self.layer, self.tp = layer, tp
        self.head_dim, self.dropout = config.head_dim, config.attention_dropout
        h, std = config.hidden_size, config.init_std
        self.qkv = ColumnParallelLinear(h, 3 * h, tp=tp, init_std=std)
        self.out = RowParallelLinear(h, h, tp=tp, init_std=std / math.sqrt(2 * config.num_layers))

    def forward(self, x: Tensor, dropout: DropoutStream | None) -> Tensor:
        """[S, B, H] -> [S, B, H]; `dropout` is None where there is none (evaluation)."""
        s, b, _ = x.shape
        qkv = self.qkv(x).view(s, b, -1, 3, self.head_dim)  # [S, B, N/t, 3, D]
        q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # each [B, N/t, S, D]
        p = 0.0
        if dropout is not None and self.dropout > 0:
            p = self.dropout
            dropout.enter(self.layer, "attention", self.tp)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)  # [B, N/t, S, D]
        return self.out(y.permute(2, 0, 1, 3).reshape(s, b, -1))
