"""Checks between the settings of a model, and between a model and its training data.

Each returns a line with the fix, or None. A family that cannot be found is reported by `model_fault` alone.
"""

from typing import Any

from mlm.config.imports import OwnCodeError
from mlm.models.config import ModelConfig


def model_fault(model: ModelConfig) -> str | None:
    """Return what is wrong with a model's family, or with settings that no model of it has."""
    try:
        family = model.family
    except OwnCodeError as error:
        return str(error)
    for name in model.options.keys() - family.options.keys():
        known = ", ".join(family.options) or "none"
        return f"model.options.{name}: model.kind={model.kind} has the settings: {known}; remove it"
    return family.model_problem(model)


def pretraining_fault(config: Any) -> str | None:
    """Return the problem of a head that is not pretrained."""
    head = config.model.head
    if head == "language_model":
        return None
    return (
        f"model.head={head} is for finetuning (`mlm finetune`); pretraining needs model.head=language_model"
    )


def data_fault(config: Any) -> str | None:
    """Return a setting of the data that the model's samples cannot be made with."""
    model: ModelConfig = config.model
    try:
        return model.family.data_problem(config.data)
    except OwnCodeError:
        return None
