"""Llamas and Mixtrals to train: their shapes and random weights, and the contenders of `transformers`."""

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from bench.contenders import TransformersTrainee
from bench.shapes import Shape
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
        width = max(1, round(self.hidden_size / 12)) * 32
        options = {"num_kv_heads": self.num_kv_heads}
        return replace(
            super().model(), kind="llama", ffn_hidden_size=width, activation="silu", options=options
        )

    def describe(self) -> str:
        return f"Llama, {super().describe()}, {self.num_kv_heads} kv heads"


@dataclass(frozen=True)
class MixtralShape(LlamaShape):
    """Sizes of a Mixtral of 8 experts of half the Llama's MLP: a token goes through as many weights."""

    def model(self) -> ModelConfig:
        dense = super().model()
        options = {**dense.options, "num_experts": NUM_EXPERTS, "experts_per_token": 2}
        return replace(dense, ffn_hidden_size=dense.ffn_size // 2, options=options)

    def describe(self) -> str:
        return f"{super().describe()}, {NUM_EXPERTS} experts of which 2 a token"


class TransformersMixtral(TransformersTrainee):
    """MixtralForCausalLM, which stacks its experts, and its own choice of their products."""

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
