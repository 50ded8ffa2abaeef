"""The user's own optimizers and decays: how they are called, and their problems before a rank starts.

This module imports no torch, so that commands check their settings without it.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from numbers import Real
from typing import Any

from mlm.config.imports import OwnCodeError, imported
from mlm.optim.config import DECAYS, OPTIMIZERS, OptimizerConfig, ScheduleConfig

PROBED = (0.0, 0.5, 1.0)
"""Progress at which a decay is evaluated before training starts."""
ROUNDING = 1e-6
"""Distance from 0 to 1 that is rounding in a decay of the user's own."""


def own_optimizer(config: OptimizerConfig) -> Callable[..., Any] | None:
    """Return what builds an optimizer from (groups, config), None for a shipped kind. Raises OwnCodeError."""
    found = imported("optimizer.kind", config.kind, OPTIMIZERS.shipped, Callable)
    if found is None:
        _no_options("optimizer.kind", config.kind, "optimizer", config.options)
        return None
    name = f"optimizer.kind={config.kind}"
    if not _is_optimizer_class(found):
        _bind(found, name, "build(groups, config)", "let it take these two arguments", [], config)
        own: Callable[..., Any] = found
        return own
    settings = {"lr": config.lr, **config.options}
    shown = ", ".join(f"{key}=…" for key in settings)
    fix = "set what it takes by optimizer.options.NAME"
    _bind(found, name, f"{found.__name__}(groups, {shown})", fix, [], **settings)
    return lambda groups, config: found(groups, **settings)


def own_decay(schedule: ScheduleConfig) -> Callable[[float], Any] | None:
    """Return the decay of the user's own, None for a shipped one. Raises OwnCodeError."""
    found = imported("schedule.decay", schedule.decay, DECAYS.shipped, Callable)
    if found is None:
        _no_options("schedule.decay", schedule.decay, "schedule", schedule.options)
        return None
    shown = "".join(f", {key}=…" for key in schedule.options)
    _bind(
        found,
        f"schedule.decay={schedule.decay}",
        f"decay(progress{shown})",
        "let it take progress, from 0 to 1, and schedule.options by name",
        0.0,
        **schedule.options,
    )
    return partial(found, **schedule.options)


def share_of(schedule: ScheduleConfig, decay: Callable[[float], Any], progress: float) -> float:
    """Return the value of the user's own decay. Raises OwnCodeError if it is no number from 0 to 1."""
    name = f"schedule.decay={schedule.decay}: decay({progress:g})"
    try:
        share = decay(progress)
    except Exception as error:
        raise OwnCodeError(f"{name} fails ({type(error).__name__}: {error}); correct it") from error
    value: float = float(share) if isinstance(share, Real) else math.nan
    if not -ROUNDING <= value <= 1 + ROUNDING:
        shown = share if isinstance(share, Real) or share is None else f"a {type(share).__name__}"
        raise OwnCodeError(f"{name} is {shown}; return a number from 0 to 1, where 1 is optimizer.lr")
    return min(1.0, max(0.0, value))


def check_own_code(optimizer: OptimizerConfig, schedule: ScheduleConfig | None = None) -> None:
    """Raise OwnCodeError for an optimizer that cannot be called, or a decay that yields no learning rate."""
    own_optimizer(optimizer)
    decay = None if schedule is None else own_decay(schedule)
    if schedule is not None and decay is not None:
        for progress in PROBED:
            share_of(schedule, decay, progress)


def _is_optimizer_class(found: object) -> bool:
    """True for a class derived from torch.optim.Optimizer."""
    bases = found.__mro__ if isinstance(found, type) else ()
    return any((b.__module__, b.__name__) == ("torch.optim.optimizer", "Optimizer") for b in bases)


def _no_options(key: str, kind: str, section: str, options: Mapping[str, object]) -> None:
    for name in options:
        raise OwnCodeError(f"{section}.options.{name}: {key}={kind} takes no options; remove it")


def _bind(
    found: Callable[..., Any], name: str, call: str, fix: str, *arguments: object, **named: object
) -> None:
    """Raise OwnCodeError if something cannot be called with these arguments."""
    try:
        parameters = signature(found)
    except (TypeError, ValueError):  # of C, without a signature
        return
    try:
        parameters.bind(*arguments, **named)
    except TypeError as error:
        raise OwnCodeError(f"{name}: cannot be called as {call} ({error}); {fix}") from error
