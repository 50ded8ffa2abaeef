"""Llama, Mistral, Qwen 2 and Qwen 3, split like GPT-2.

Shapes: S sequence, B micro-batch, H hidden, t = tensor-parallel size.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.models.config import ModelConfig
from mlm.models.gpt2.model import GPT2
from mlm.models.llama.attention import GroupedQueryAttention
from mlm.models.llama.latent_attention import LatentAttention
from mlm.models.llama.rope import frequencies
from mlm.models.llama.settings import LlamaSettings, num_blocks
from mlm.models.norms import RMSNorm
from mlm.models.rotary import Rotary
from mlm.models.transformer import MLP, TransformerLayer, activate
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis


class GatedMLP(MLP):
    """Gated MLP y = W2 (act(G x) * (U x)) (arXiv:2002.05202): SwiGLU, or GeGLU with model.activation=gelu.

    G and U are in one weight, whose rows are ordered `[block][gate, up][F / blocks]`, with gcd(N, F) blocks:
    a contiguous split at any tp that divides the heads and F gives whole blocks. Columns of W2 are in the
    usual order.
    """

    def __init__(self, config: ModelConfig, *, tp: Axis, sequence_parallel: bool = False) -> None:
        super().__init__(config, tp=tp, sequence_parallel=sequence_parallel)
        self.block = config.ffn_size // num_blocks(config)

    def inner(self, y: Tensor) -> Tensor:
        """[S, B, 2F/t] -> [S, B, F/t]."""
        pairs = y.unflatten(-1, (-1, 2, self.block))  # [S, B, blocks/t, 2, F / blocks]
        if self.activation != "silu":
            gated: Tensor = activate(pairs[..., 0, :], self.activation) * pairs[..., 1, :]
            return gated.flatten(2)
        if torch.compiler.is_compiling():  # it decides what to keep, and traces no result written in parts
            gated = F.silu(pairs[..., 0, :]) * pairs[..., 1, :]
            return gated.flatten(2)
        gated = _SwiGLU.apply(pairs)  # type: ignore[no-untyped-call]
        return gated.flatten(2)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [..., 2, F]; nothing is kept but its input."""

    @staticmethod
    def forward(ctx: Any, pairs: Tensor) -> Tensor:
        ctx.save_for_backward(pairs)
        return F.silu(pairs[..., 0, :]).mul_(pairs[..., 1, :])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (pairs,) = ctx.saved_tensors
        gate, up = pairs[..., 0, :], pairs[..., 1, :]
        d = torch.empty_like(pairs)
        torch.mul(dy, F.silu(gate), out=d[..., 1, :])
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d[..., 0, :])
        return d


def build_attention(config: ModelConfig, **arguments: Any) -> GroupedQueryAttention:
    """Return the attention of a model's settings; `arguments` are those of SelfAttention."""
    kind = LatentAttention if LlamaSettings.of(config).kv_lora_rank else GroupedQueryAttention
    return kind(config, **arguments)


class LlamaLayer(TransformerLayer):
    """RMSNorm, grouped-query attention with rotary positions, RMSNorm, gated MLP."""

    norm_type = RMSNorm
    attention_type = staticmethod(build_attention)
    mlp_type = GatedMLP


class Llama(GPT2):
    """Decoder-only transformer with rotary positions; its output layer may have weights of its own."""

    layer_type: ClassVar[type[TransformerLayer]] = LlamaLayer

    def _add_head(self) -> None:
        super()._add_head()
        config = self.config
        if config.head == "language_model" and not config.is_tied:
            self.output = VocabParallelEmbedding(
                config.vocab_size,
                config.padded_vocab_size(self.tp.size),
                config.hidden_size,
                tp=self.tp,
                sequence_parallel=self.sequence_parallel,
                init_std=config.init_std,
                init_seed=None,
            )

    @property
    def vocabulary(self) -> VocabParallelEmbedding:
        """The weights of the output layer, in the last stage."""
        return self.token if self.config.is_tied else self.output

    def rotary(self, x: Tensor, positions: Tensor | None) -> Rotary:
        """Return the tables for all of S, of which `x` holds a part with sequence parallelism."""
        if positions is None:
            length = x.shape[0] * (self.tp.size if self.sequence_parallel else 1)
            places = torch.arange(length, device=x.device).unsqueeze(1)  # [S, 1]
        else:
            places = positions.t()  # [S, B]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        turns, factor = frequencies(LlamaSettings.of(self.config), wide, x.device)
        return Rotary.of(places, turns, factor, x.dtype)
