"""Stand-in until mlm.checkpoint.hf_bert is here."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mlm.config.model_schema import ModelConfig


def bert_from_huggingface(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Their parameters under our names."""
    norms = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
    outside = {"embedding_norm": "bert.embeddings.LayerNorm"}
    if model.norm == "pre":
        norms = {"attention_norm": "attention.ln", "mlp_norm": "ln"}
        outside = {"final_norm": "bert.encoder.ln"}
    outside |= {
        "pooler": "bert.pooler.dense",
        "mlm_head.transform": "cls.predictions.transform.dense",
        "mlm_head.norm": "cls.predictions.transform.LayerNorm",
        "sop_head": "cls.seq_relationship",
    }
    inside = norms | {
        "attention.out": "attention.output.dense",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
    }
    for n in range(model.num_layers):
        outside |= {f"layers.{n}.{o}": f"bert.encoder.layer.{n}.{t}" for o, t in inside.items()}
    out = {
        f"{o}.weight": state[f"bert.embeddings.{t}_embeddings.weight"]
        for o, t in {"token": "word", "position": "position", "token_type": "token_type"}.items()
    }
    out["mlm_head.vocabulary.bias"] = state["cls.predictions.bias"]
    for kind in ("weight", "bias"):
        out |= {f"{o}.{kind}": state[f"{t}.{kind}"] for o, t in outside.items()}
        for n in range(model.num_layers):
            parts = [
                state[f"bert.encoder.layer.{n}.attention.self.{x}.{kind}"].unflatten(0, (model.num_heads, -1))
                for x in ("query", "key", "value")
            ]
            out[f"layers.{n}.attention.qkv.{kind}"] = torch.stack(parts, 1).flatten(0, 2)
    return out
