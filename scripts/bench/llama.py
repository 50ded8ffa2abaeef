"""Llamas and Mixtrals to train: their shapes and random weights, and the contenders of `transformers`."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.contenders import TransformersTrainee, imported
from bench.shapes import Shape
from mlm.convert.huggingface.llama import write_config
from mlm.convert.huggingface.mapping import TokenIds
from mlm.models.config import ModelConfig

NUM_EXPERTS = 8
BLOCK = "block_sparse_moe"
"""Router and experts in Mixtral's files; `mlp` in its module."""


@dataclass(frozen=True)
class LlamaShape(Shape):
    """Sizes of a Llama: an MLP of 8/3 H in multiples of 32, shared heads of keys and values, untied."""

    num_kv_heads: int = 0

    @classmethod
    def of(cls, shape: Shape) -> "LlamaShape":
        """The Llama with the sizes of a GPT-2, and three queries to a head of keys, or two, or one."""
        shared = next(n for n in (3, 2, 1) if shape.num_heads % n == 0)
        return cls(**asdict(shape), num_kv_heads=shape.num_heads // shared)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

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
        h, kv = self.hidden_size, self.num_kv_heads * self.head_dim
        layer = {
            "input_layernorm": (h,),
            "self_attn.q_proj": (h, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, h),
            "post_attention_layernorm": (h,),
            **self.mlp_sizes(h, model.ffn_size),
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

    def mlp_sizes(self, h: int, f: int) -> dict[str, tuple[int, int]]:
        return {"mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f)}

    def describe(self) -> str:
        return f"Llama, {super().describe()}, {self.num_kv_heads} kv heads"


@dataclass(frozen=True)
class MixtralShape(LlamaShape):
    """Sizes of a Mixtral of 8 experts of half the Llama's MLP: a token goes through as many weights."""

    def model(self) -> ModelConfig:
        dense = super().model()
        options = {**dense.options, "num_experts": NUM_EXPERTS, "experts_per_token": 2}
        return replace(dense, ffn_hidden_size=dense.ffn_size // 2, options=options)

    def mlp_sizes(self, h: int, f: int) -> dict[str, tuple[int, int]]:
        """Names and shapes of router and experts, each for itself as on disk."""
        each = {"w1": (f, h), "w3": (f, h), "w2": (h, f)}
        experts = {
            f"{BLOCK}.experts.{n}.{name}": size for n in range(NUM_EXPERTS) for name, size in each.items()
        }
        return {f"{BLOCK}.gate": (NUM_EXPERTS, h), **experts}

    def describe(self) -> str:
        return f"{super().describe()}, {NUM_EXPERTS} experts of which 2 a token"


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


class TransformersMixtral(TransformersTrainee):
    """`transformers`' MixtralForCausalLM with sdpa attention, and its own choice of products of experts."""

    def build(self) -> Any:
        transformers = imported("transformers")
        known = write_config(self.spec.shape.model(), TokenIds(eod=0, bos=0))
        settings = {key: value for key, value in known.items() if key not in ("architectures", "dtype")}
        config = transformers.MixtralConfig(**settings, use_cache=False)
        config._attn_implementation = "sdpa"
        return transformers.MixtralForCausalLM(config)

    def state(self) -> dict[str, Tensor]:
        found = {k.replace(BLOCK, "mlp"): v for k, v in super().state().items() if ".experts." not in k}
        stored = super().state()
        for layer in range(self.spec.shape.num_layers):
            experts = [f"model.layers.{layer}.{BLOCK}.experts.{n}" for n in range(NUM_EXPERTS)]
            pairs = [torch.cat([stored[f"{e}.w1.weight"], stored[f"{e}.w3.weight"]]) for e in experts]
            place = f"model.layers.{layer}.mlp.experts"
            found[f"{place}.gate_up_proj"] = torch.stack(pairs)
            found[f"{place}.down_proj"] = torch.stack([stored[f"{e}.w2.weight"] for e in experts])
        return found

    def as_huggingface(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, stack in gradients.items():
            block, _, part = name.partition(".mlp.experts.")
            if not part:
                found[name.replace(".mlp.", f".{BLOCK}.")] = stack
                continue
            for number, expert in enumerate(stack):
                names = ("w1", "w3") if part == "gate_up_proj" else ("w2",)
                parts = zip(names, expert.chunk(len(names)), strict=True)
                found |= {f"{block}.{BLOCK}.experts.{number}.{w}.weight": x for w, x in parts}
        return found
