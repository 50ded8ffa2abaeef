"""transformers' BERTs and their parameters under our names, for tests."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForPreTraining,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from mlm.models.config import ModelConfig

POST_NORMS = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
PRE_NORMS = {"attention_norm": "attention.ln", "mlp_norm": "ln"}
LINEAR = {
    "attention.out": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
OUTSIDE = {
    "token.weight": "bert.embeddings.word_embeddings.weight",
    "position.weight": "bert.embeddings.position_embeddings.weight",
    "token_type.weight": "bert.embeddings.token_type_embeddings.weight",
    "mlm_head.vocabulary.bias": "cls.predictions.bias",
}
PARTS = {
    "pooler": "bert.pooler.dense",
    "mlm_head.transform": "cls.predictions.transform.dense",
    "mlm_head.norm": "cls.predictions.transform.LayerNorm",
    "sop_head": "cls.seq_relationship",
}


def pretraining_model(config: ModelConfig, seed: int = 0) -> Any:
    """transformers' model for pretraining of the same shape, with random weights, biases and norms too."""
    torch.manual_seed(seed)
    kind, of = (
        (BertForPreTraining, BertConfig)
        if config.norm == "post"
        else (MegatronBertForPreTraining, MegatronBertConfig)
    )
    model = kind(
        of(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.ffn_size,
            hidden_act={"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.activation],
            hidden_dropout_prob=config.hidden_dropout,
            attention_probs_dropout_prob=config.attention_dropout,
            max_position_embeddings=config.max_positions,
            type_vocab_size=config.token_types,
            layer_norm_eps=config.layer_norm_eps,
        )
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model.train()


def as_ours(theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Their parameters, or gradients of them, under our names."""
    out = {ours: theirs[name] for ours, name in OUTSIDE.items()}
    parts = dict(PARTS)
    if config.norm == "post":
        parts["embedding_norm"] = "bert.embeddings.LayerNorm"
    else:
        parts["final_norm"] = "bert.encoder.ln"
    norms = POST_NORMS if config.norm == "post" else PRE_NORMS
    for n in range(config.num_layers):
        for ours, name in {**LINEAR, **norms}.items():
            parts[f"layers.{n}.{ours}"] = f"bert.encoder.layer.{n}.{name}"
    for kind in ("weight", "bias"):
        out |= {f"{ours}.{kind}": theirs[f"{name}.{kind}"] for ours, name in parts.items()}
        for n in range(config.num_layers):
            names = [f"bert.encoder.layer.{n}.attention.self.{x}.{kind}" for x in ("query", "key", "value")]
            qkv = [theirs[name].unflatten(0, (config.num_heads, -1)) for name in names]  # [N, D, …] each
            out[f"layers.{n}.attention.qkv.{kind}"] = torch.stack(qkv, 1).flatten(0, 2)
    return out
