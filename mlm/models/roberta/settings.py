"""Settings of the RoBERTa family alone: model.options.NAME."""

from dataclasses import dataclass, fields

from mlm.models.config import ModelConfig
from mlm.models.family import Architecture, option, option_problem
from mlm.util.errors import Problem

POOLERS = ("tanh", "relu")


@dataclass(frozen=True, kw_only=True, slots=True)
class RobertaSettings:
    """Differences between RoBERTa and DistilBERT; the defaults are those of a BERT without pairs."""

    position_offset: int = 0
    """Row of the position table for the first token of a text. RoBERTa and XLM-R: 2, one after the id of
    padding; the table has so many rows more."""
    pooler_activation: str = "tanh"
    """Activation of the pooler of head=classification: tanh, or relu as DistilBERT's."""


DEFAULTS: dict[str, bool | int | float | str] = {
    field.name: field.default  # type: ignore[misc]
    for field in fields(RobertaSettings)
}


def position_offset(model: ModelConfig) -> int:
    offset = option(model, "position_offset")
    assert type(offset) is int, "checked with the configuration"
    return offset


def architecture(model: ModelConfig) -> Architecture:
    return Architecture(
        head_dim=model.hidden_size // model.num_heads,
        kv_heads=model.num_heads,
        position_offset=position_offset(model),
    )


def options_problem(model: ModelConfig) -> Problem | None:
    for name, value in model.options.items():
        if problem := option_problem(DEFAULTS, name, value):
            return problem
    if (offset := position_offset(model)) > model.vocab_size:
        key = "model.options.position_offset"
        why = f"{key}={offset} is one after the id of padding, and model.vocab_size={model.vocab_size}"
        return Problem((key, "model.vocab_size"), why, f"use {key}=2")
    pooler, key = option(model, "pooler_activation"), "model.options.pooler_activation"
    if pooler not in POOLERS:
        return Problem((key,), f"{key}={pooler} is none of ours", f"use {' or '.join(POOLERS)}")
    return None
