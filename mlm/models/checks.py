"""What must hold between the settings of a model, and between a model and what it is trained on."""

from typing import Any

from mlm.data.config import DataConfig
from mlm.models.config import ModelConfig

SHORTEST = 8
"""Tokens of a BERT sample at the least: [CLS], two [SEP] and some text."""
DOCUMENT_SWITCHES = ("reset_positions", "reset_attention", "mask_eod_loss")


def model_fault(model: ModelConfig) -> str | None:
    """Settings that no model of its kind has."""
    if model.kind == "gpt2":
        if model.norm == "post":
            return "model.norm=post is BERT's, and model.kind=gpt2 has its norms first; use model.norm=pre"
        if model.token_types:
            return (
                f"model.token_types={model.token_types}: model.kind=gpt2 knows no kinds of segments; "
                "use model.token_types=0"
            )
    elif model.token_types < 2:
        return (
            f"model.token_types={model.token_types}: model.kind=bert tells two segments apart; "
            "use model.token_types=2"
        )
    return None


def pretraining_fault(config: Any) -> str | None:
    """A head that is not pretrained."""
    head = config.model.head
    if head == "language_model":
        return None
    return (
        f"model.head={head} is for finetuning (`mlm finetune`); pretraining needs model.head=language_model"
    )


def bert_data_fault(config: Any) -> str | None:
    """Settings of the data that BERT samples do not have, or that they cannot be made with."""
    data: DataConfig = config.data
    if config.model.kind != "bert":
        return None
    for name in DOCUMENT_SWITCHES:
        if getattr(data, name):
            return (
                f"data.{name}=true is for samples of several documents, and a BERT sample is of one; "
                f"use data.{name}=false"
            )
    if data.seq_length < SHORTEST:
        return (
            f"data.seq_length={data.seq_length} holds no two segments with [CLS] and two [SEP]; use "
            f"data.seq_length={SHORTEST} or more"
        )
    return None
