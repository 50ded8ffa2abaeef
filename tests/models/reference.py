"""`transformers`' GPT-2 and BERTs for tests, every weight, bias and norm of them random."""

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from mlm.models.config import ModelConfig


@torch.no_grad()
def randomized(model: Any, deviation: float = 0.05) -> Any:
    for p in model.parameters():
        p.add_(torch.randn_like(p) * deviation)
    return model


def random_gpt2(deviation: float = 0.05, **settings: int | str) -> GPT2LMHeadModel:
    """Without dropout."""
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model: GPT2LMHeadModel = GPT2LMHeadModel(
        GPT2Config(bos_token_id=0, eos_token_id=0, **dropout, **settings)
    )
    return randomized(model, deviation)  # type: ignore[no-any-return]


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
    return randomized(model).train()
