"""A transformer layer: attention and MLP on a residual stream, layer norm first or last.

Shapes: S sequence, B micro-batch, H hidden, F ffn_size, t = tensor-parallel size. With sequence parallelism
the residual stream is [S/t, B, H] (arXiv:2205.05198, section 4.2.2).
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.models.attention import SelfAttention
from mlm.models.cache import Reading
from mlm.models.config import ModelConfig
from mlm.models.documents import Spans
from mlm.models.norms import HALF, LayerNorm
from mlm.models.rotary import Rotary
from mlm.models.shape import architecture_of
from mlm.parallel.dropout import DropoutStream, site_keys
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.mesh import Axis, ExpertAxes


class _TanhGELU(torch.autograd.Function):
    """GELU's tanh form in half precision on a CPU, whose kernels compute tanh forward and backward.

    y = x s(x (a + b x^2)), s the logistic function. The forward pass computes the derivative, too, and saves
    it in place of x, in its dtype.
    """

    a, b = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
    block = 1 << 15  # float32 elements per thread at a time: more leave the cache, fewer cost calls

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x, needs_slope = x.contiguous(), ctx.needs_input_grad[0]
        block = _TanhGELU.block * max(2, torch.get_num_threads())
        y, slope = torch.empty_like(x), torch.empty_like(x) if needs_slope else x
        buffers = torch.empty(3, min(x.numel(), block), dtype=torch.float32)
        a, minus_twice_a, one = torch.tensor([_TanhGELU.a, -2 * _TanhGELU.a, 1.0])
        blocks = (t.view(-1).split(block) for t in (x, y, slope))
        for half_x, half_y, half_slope in zip(*blocks, strict=True):
            x32, inner, s = buffers[:, : len(half_x)].unbind()
            x32.copy_(half_x)
            torch.addcmul(a, x32, x32, value=_TanhGELU.b, out=inner)  # a + b x^2
            torch.mul(x32, inner, out=s).sigmoid_()
            half_y.copy_(x32.mul_(s))
            if needs_slope:  # s + y (1 - s) (a + 3 b x^2)
                x32.mul_(torch.add(minus_twice_a, inner, alpha=3, out=inner))
                half_slope.copy_(torch.lerp(s, one, x32, out=s))
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        slope: Tensor = ctx.saved_tensors[0]
        return dy * slope


def activate(x: Tensor, activation: str) -> Tensor:
    """SiLU or GELU of model.activation (arXiv:1606.08415), or ReLU squared (arXiv:2109.08668)."""
    if activation == "relu2":
        return F.relu(x).square()
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu_tanh" and x.is_cpu and x.dtype in HALF and not torch.compiler.is_compiling():
        y: Tensor = _TanhGELU.apply(x)  # type: ignore[no-untyped-call]
        return y
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class MLP(nn.Module):
    """y = W2 act(W1 x): W1 split by column, W2 by row (arXiv:1909.08053, figure 3a)."""

    def __init__(self, config: ModelConfig, *, tp: Axis, sequence_parallel: bool = False) -> None:
        super().__init__()
        h, f, std, sizes = config.hidden_size, config.ffn_size, config.hidden_std, architecture_of(config)
        self.activation = config.activation
        self.up = ColumnParallelLinear(
            h,
            2 * f if sizes.gated else f,
            tp=tp,
            sequence_parallel=sequence_parallel,
            init_std=std,
            init_seed=None,
            bias=sizes.bias,
        )
        self.down = RowParallelLinear(
            f,
            h,
            tp=tp,
            sequence_parallel=sequence_parallel,
            init_std=std / math.sqrt(2 * config.num_layers),
            init_seed=None,
            bias=sizes.bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        y: Tensor = self.down(self.inner(self.up(x)))
        return y

    def inner(self, y: Tensor) -> Tensor:
        return activate(y, self.activation)


class TransformerLayer(nn.Module):
    """Transformer layer: attention, then the MLP, each with a residual connection.

    norm=pre: x + drop(attention(norm(x))), as in GPT-2 and Megatron-LM's BERT (arXiv:1909.08053, figure 7b);
    a family may norm the branch's output too, or in place of its input, or run attention and MLP in parallel:
    x + drop(attention(h)) + drop(mlp(h)) with h = norm(x).
    norm=post: norm(x + drop(attention(x))), as in the first BERT (figure 7a).
    """

    attention_type: ClassVar[Callable[..., SelfAttention]] = SelfAttention
    mlp_type: ClassVar[type[MLP]] = MLP
    dropout_keys: Tensor
    """Keys of the dropout masks of its two branches, int32 [2, 2]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer: int,
        tp: Axis,
        sequence_parallel: bool = False,
        recompute_attention: bool = False,
        cp: Axis | None = None,
        experts: ExpertAxes | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.norms_first = config.hidden_dropout, config.norm == "pre"
        dropout_keys = site_keys([(layer, "attention out"), (layer, "mlp out")])
        self.register_buffer("dropout_keys", dropout_keys, persistent=False)
        parts = architecture_of(config)
        self.has_output_norms, self.is_parallel = parts.output_norms, parts.is_parallel
        self.residual_multiplier = parts.residual_multiplier
        self.attention_norm = self.build_norm(config) if parts.input_norms else nn.Identity()
        self.attention = self.attention_type(
            config,
            layer=layer,
            tp=tp,
            sequence_parallel=sequence_parallel,
            recompute=recompute_attention,
            cp=cp,
        )
        has_norm = parts.input_norms and not parts.is_parallel
        self.mlp_norm = self.build_norm(config) if has_norm else nn.Identity()
        self.mlp = self.build_mlp(
            config, layer=layer, tp=tp, sequence_parallel=sequence_parallel, cp=cp, experts=experts
        )
        if self.has_output_norms:
            self.attention_output_norm = self.build_norm(config)
            self.mlp_output_norm = self.build_norm(config)

    @classmethod
    def build_norm(cls, config: ModelConfig) -> nn.Module:
        """Return a norm of the residual stream; also used after the last layer."""
        return LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def build_mlp(
        self,
        config: ModelConfig,
        *,
        layer: int,
        tp: Axis,
        sequence_parallel: bool,
        cp: Axis | None,
        experts: ExpertAxes | None,
    ) -> nn.Module:
        """Return the module after attention: [S, B, H] -> [S, B, H]. `experts` are axes of a mixture."""
        return self.mlp_type(config, tp=tp, sequence_parallel=sequence_parallel)

    def forward(
        self,
        x: Tensor,
        stream: DropoutStream | None,
        spans: Spans | None = None,
        reading: Reading | None = None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """[S, B, H] -> [S, B, H].

        With `spans` no document attends to another; with `reading` earlier tokens are in its cache; `rotary`
        rotates queries and keys by their positions.
        """

        def drop(y: Tensor, branch: int) -> Tensor:
            y = y if self.residual_multiplier == 1 else y * self.residual_multiplier
            return y if stream is None else stream.hidden(y, self.dropout, self.dropout_keys[branch])

        if not self.norms_first:
            x = self.attention_norm(x + drop(self.attention(x, stream, spans, reading, rotary), 0))
            y: Tensor = self.mlp_norm(x + drop(self.mlp(x), 1))
            return y
        h = self.attention_norm(x)
        y = self.attention(h, stream, spans, reading, rotary)
        if self.is_parallel:
            return x + drop(y, 0) + drop(self.mlp(h), 1)
        x = x + drop(self.attention_output_norm(y) if self.has_output_norms else y, 0)
        y = self.mlp(self.mlp_norm(x))
        return x + drop(self.mlp_output_norm(y) if self.has_output_norms else y, 1)
