"""Checks between the settings of a model, and between a model and its training data.

A family that cannot be found is reported by `model_problem` alone.
"""

from typing import Any

from mlm.config.imports import OwnCodeError
from mlm.models.config import ModelConfig
from mlm.util.errors import Problem


def model_problem(model: ModelConfig) -> Problem | None:
    """Return the problem of a model's family, or of settings that no model of it has."""
    try:
        family = model.family
    except OwnCodeError as error:
        return error.problems[0]
    for name in model.options.keys() - family.options.keys():
        known = ", ".join(family.options) or "none"
        problem = f"model.options.{name}: model.kind={model.kind} has the settings: {known}"
        return Problem((f"model.options.{name}", "model.kind"), problem, "remove it")
    return family.model_problem(model)


def pretraining_problem(config: Any) -> Problem | None:
    """Return the problem of a head that is not pretrained."""
    head = config.model.head
    if head == "language_model":
        return None
    return Problem(
        ("model.head",),
        f"model.head={head} is for finetuning (`mlm finetune`)",
        "pretraining needs model.head=language_model",
    )


def data_problem(config: Any) -> Problem | None:
    """Return the problem of data settings that the model's samples cannot be made with."""
    try:
        found: Problem | None = config.model.family.data_problem(config.data)
    except OwnCodeError:
        return None
    return found
