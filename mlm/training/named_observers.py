"""Observers that `train.observers` names, from their settings: built on each rank, and checked before."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlm.config.fields import ObserverEntry
from mlm.config.imports import OwnCodeError, imported
from mlm.training.gradient_norms import GradientNorms
from mlm.training.observer import Observer
from mlm.util.errors import Problem, format_value

KEY = "train.observers"
SHIPPED: Mapping[str, type[Observer]] = {"mlm.training.gradient_norms:GradientNorms": GradientNorms}
"""Observers that saved settings may name, too."""


def observer_problems(entries: Sequence[ObserverEntry]) -> list[Problem]:
    try:
        named_observers(entries)
    except OwnCodeError as error:
        return list(error.problems)
    return []


def named_observers(entries: Sequence[ObserverEntry]) -> list[Observer]:
    """Build the observers that train.observers names. Raises OwnCodeError (a UserError)."""
    return [_build(entry) for entry in entries]


def _build(entry: ObserverEntry) -> Observer:
    fields: dict[str, Any] = {"use": entry} if isinstance(entry, str) else dict(entry)
    path = fields.pop("use", None)
    if not isinstance(path, str):
        problem = f"{KEY}=[{format_value(entry)}]: names no observer"
        raise OwnCodeError(problem, keys=(KEY,), fix="add use: package.module:NAME")
    typed = f"'{KEY}=[{format_value(entry)}]'"
    target: Callable[..., object] = SHIPPED.get(path) or imported(KEY, path, SHIPPED, Callable, typed=typed)
    try:
        observer = target(**fields)
    except Exception as error:
        problem = f"{KEY}={path}: building it fails ({type(error).__name__}: {error})"
        raise OwnCodeError(problem, keys=(KEY,), fix="correct it, or its fields") from error
    if not isinstance(observer, Observer):
        raise OwnCodeError(
            f"{KEY}={path}: makes no mlm.training.observer.Observer; derive it from that class", keys=(KEY,)
        )
    return observer
