"""Tiny models of every family, without dropout. Nothing of `transformers` is imported: ranks use them too."""

from typing import Any

from mlm.models.config import ModelConfig

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
OF_KIND: dict[str, dict[str, Any]] = {"bert": {"token_types": 2}, "llama": {"activation": "silu"}}


def tiny(kind: str = "gpt2", **changes: Any) -> ModelConfig:
    return ModelConfig(kind=kind, **SHAPE | OF_KIND.get(kind, {}) | changes)
