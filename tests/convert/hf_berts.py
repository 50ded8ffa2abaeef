"""Tiny BERTs of `transformers` for tests: both families, every class."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from mlm.corpus.train_tokenizer import train_wordpiece
from mlm.data.vocabulary_files import BERT_SPECIAL
from tests.convert import hf_models
from tests.models.reference import randomized

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "intermediate_size": 60,
    "vocab_size": 331,  # no multiple of 128
    "max_position_embeddings": 48,
    "layer_norm_eps": 1e-4,
    "hidden_dropout_prob": 0.05,
    "attention_probs_dropout_prob": 0.2,
}
MODEL = replace(hf_models.MODEL, kind="bert", norm="post", activation="gelu", token_types=2, head="none")
"""SHAPE as model settings of ours, of model_type bert and without a head."""
FAMILIES = {"bert": "Bert", "megatron-bert": "MegatronBert"}
"""model_type -> what the names of its classes begin with."""


def make_bert(folder: Path, family: str, name: str, **settings: Any) -> PreTrainedModel:
    """Save a BERT of random weights, biases and norms too; `name`: of its class, behind the family's."""
    torch.manual_seed(0)
    prefix = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**(SHAPE | settings))
    extra = {"add_pooling_layer": False} if name == "ModelWithoutPooler" else {}
    name = name.removesuffix("WithoutPooler")
    model: PreTrainedModel = randomized(getattr(transformers, f"{prefix}{name}")(config, **extra).eval())
    model.save_pretrained(folder)
    return model


def add_word_pieces(folder: Path) -> None:
    texts = ["The quick brown fox jumps over the lazy dog, again and again."] * 5
    train_wordpiece(lambda: texts, 300).save(folder)


def add_vocabulary(folder: Path) -> None:
    """Put a vocab.txt into a folder, and a tokenizer_config.json that keeps case."""
    words = [*BERT_SPECIAL, "the", "The", "fox", "##es", "."]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
