"""Llama, Mistral, Qwen 2 and Qwen 3, split like GPT-2.

Shapes: S sequence, B micro-batch, H hidden, t = tensor-parallel size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mlm.models.config import ModelConfig
from mlm.models.gpt2.model import GPT2
from mlm.models.llama.attention import GroupedQueryAttention
from mlm.models.llama.gated import GatedMLP
from mlm.models.llama.latent_attention import LatentAttention
from mlm.models.llama.mixture import MixtureOfExperts
from mlm.models.llama.rope import frequencies
from mlm.models.llama.settings import LlamaSettings
from mlm.models.norms import LayerNorm, RMSNorm
from mlm.models.rotary import Rotary
from mlm.models.shape import is_tied
from mlm.models.transformer import MLP, TransformerLayer
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis, ExpertAxes


def build_attention(config: ModelConfig, **arguments: Any) -> GroupedQueryAttention:
    attention = LatentAttention if LlamaSettings.of(config).kv_lora_rank else GroupedQueryAttention
    return attention(config, **arguments)


class LlamaLayer(TransformerLayer):
    """RMSNorm, grouped-query attention with rotary positions, RMSNorm, gated MLP or mixture of experts."""

    attention_type = staticmethod(build_attention)

    @classmethod
    def build_norm(cls, config: ModelConfig) -> nn.Module:
        settings, size, eps = LlamaSettings.of(config), config.hidden_size, config.layer_norm_eps
        is_zero_centered = settings.zero_centered_norms
        if settings.layer_norm:
            return LayerNorm(size, eps=eps, bias=settings.norm_bias, zero_centered=is_zero_centered)
        return RMSNorm(size, eps=eps, zero_centered=is_zero_centered)

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
        """Return a mixture of experts, or an MLP in the first layers (dense_layers) and without experts."""
        settings = LlamaSettings.of(config)
        if not settings.has_experts(layer):
            mlp = GatedMLP if settings.gated else MLP
            return mlp(config, tp=tp, sequence_parallel=sequence_parallel)
        return MixtureOfExperts(config, tp=tp, sequence_parallel=sequence_parallel, cp=cp, axes=experts)


class Llama(GPT2):
    """Decoder-only transformer with rotary positions; its output layer may be untied."""

    layer_type: ClassVar[type[TransformerLayer]] = LlamaLayer

    def _add_head(self) -> None:
        super()._add_head()
        config = self.config
        if config.head == "language_model" and not is_tied(config):
            self.output = VocabParallelEmbedding(
                config.vocab_size,
                config.padded_vocab_size(self.tp.parts),
                config.hidden_size,
                tp=self.tp,
                sequence_parallel=self.sequence_parallel,
                init_std=config.init_std,
                init_seed=None,
            )
        if config.head == "language_model":
            self.vocabulary.softcap = LlamaSettings.of(config).logit_softcap

    @property
    def vocabulary(self) -> VocabParallelEmbedding:
        return self.output if hasattr(self, "output") else self.token

    def rotary(self, x: Tensor, positions: Tensor | None, lengths: Sequence[int] | None = None) -> Rotary:
        """Return the tables for all of S, of which `x` holds a part with sequence parallelism."""
        length = x.shape[0] * (self.tp.size if self.sequence_parallel else 1)
        if positions is None:
            positions = torch.arange(length, device=x.device).unsqueeze(0)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        settings = LlamaSettings.of(self.config)

        def angles(settings: LlamaSettings) -> Rotary:
            return Rotary.of(positions.t(), *frequencies(settings, dtype, x.device), x.dtype)

        if settings.rope_scaling == "longrope":
            read_lengths = [length * self.cp.size] if lengths is None else lengths
            choices = [frequencies(settings, dtype, x.device, is_long=is_long) for is_long in (False, True)]
            is_long = [n > settings.rope_original_positions for n in read_lengths]
            chosen = torch.stack([choices[flag][0] for flag in is_long])  # [B or 1, R/2]
            return Rotary.of(positions.t(), chosen.unsqueeze(1), choices[0][1], x.dtype)
        if settings.window and settings.window_rope_theta:
            plain = replace(settings, rope_theta=settings.window_rope_theta, rope_scaling="default")
            return replace(angles(settings), sliding=angles(plain))
        return angles(settings)
