"""transformers' BERTs of our settings, for tests."""

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForPreTraining,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from mlm.models.config import ModelConfig


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
