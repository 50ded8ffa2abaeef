"""Llamas to train: their shapes and random weights, and `transformers`' LlamaForCausalLM as a contender."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bench.contenders import TransformersTrainee, imported
from bench.shapes import Shape
from mlm.models.config import ModelConfig
from mlm.models.huggingface import TokenIds
from mlm.models.llama.huggingface import write_config


@dataclass(frozen=True)
class LlamaShape(Shape):
    """Sizes of a Llama: an MLP of 8/3 H in multiples of 32, shared heads of keys and values, untied."""

    num_kv_heads: int = 0

    @classmethod
    def of(cls, shape: Shape) -> "LlamaShape":
        """The Llama with the sizes of a GPT-2, and three queries to a head of keys, or two, or one."""
        shared = next(n for n in (3, 2, 1) if shape.num_heads % n == 0)
        return cls(**asdict(shape), num_kv_heads=shape.num_heads // shared)

    def model(self) -> ModelConfig:
        """The configuration of `mlm`; no padding rows at any tp."""
        return ModelConfig(
            kind="llama",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            ffn_hidden_size=max(1, round(self.hidden_size / 12)) * 32,
            max_positions=self.seq_length,
            vocab_size=self.vocab_size,
            vocab_multiple=1,
            activation="silu",
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            options={"num_kv_heads": self.num_kv_heads},
        )

    def state(self, seed: int) -> dict[str, Tensor]:
        """Random float32 weights in LlamaForCausalLM's names; those of norms are not 1, so they show."""
        generator, model = torch.Generator().manual_seed(seed), self.model()
        h, f, kv = self.hidden_size, model.ffn_size, self.num_kv_heads * model.head_dim
        layer = {
            "input_layernorm": (h,),
            "self_attn.q_proj": (h, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, h),
            "post_attention_layernorm": (h,),
            "mlp.gate_proj": (f, h),
            "mlp.up_proj": (f, h),
            "mlp.down_proj": (h, f),
        }
        sizes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens": (self.vocab_size, h),
            **{
                f"model.layers.{n}.{name}": size
                for n in range(self.num_layers)
                for name, size in layer.items()
            },
            "model.norm": (h,),
            "lm_head": (self.vocab_size, h),
        }
        return {
            f"{name}.weight": torch.empty(size).normal_(float(len(size) == 1), 0.02, generator=generator)
            for name, size in sizes.items()
        }

    def describe(self) -> str:
        """The sizes in words."""
        return f"Llama, {super().describe()}, {self.num_kv_heads} kv heads"


class TransformersLlama(TransformersTrainee):
    """`transformers`' LlamaForCausalLM with sdpa attention."""

    def build(self) -> Any:
        shape = self.spec.shape
        transformers = imported("transformers")
        known = write_config(shape.model(), TokenIds(eod=0, bos=0))
        settings = {key: value for key, value in known.items() if key not in ("architectures", "dtype")}
        config = transformers.LlamaConfig(**settings, use_cache=False)
        config._attn_implementation = "sdpa"
        return transformers.LlamaForCausalLM(config)
