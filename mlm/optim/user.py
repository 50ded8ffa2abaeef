"""Optimizers and decays named by import path: how they are called, and checks before a rank starts.

Imports torch only after the named code has, so that commands check other settings without it.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from numbers import Real
from typing import Any

from mlm.config.imports import OwnCodeError, imported
from mlm.optim.config import DECAYS, OPTIMIZERS, OptimizerConfig, ScheduleConfig
from mlm.parallel.config import ParallelConfig
from mlm.util.errors import Problem, format_settings

Groups = list[dict[str, Any]]
"""Parameters with their settings, as torch.optim takes them."""

TORCH_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "SGD")
"""Classes of torch.optim that work at every layout: the update of an element reads that element alone. Others
are not supported: they need state that checkpoints lack, closures, sparse gradients or a warm-up phase."""
STATE_FIX = "keep tensors shaped like the parameter, and a count `step`"


def user_optimizer(config: OptimizerConfig) -> Callable[[Groups], Any] | None:
    """Return a function that builds the user's optimizer from groups; None for a shipped kind.

    Both raise OwnCodeError.
    """
    target = imported("optimizer.kind", config.kind, OPTIMIZERS.shipped, Callable)
    if target is None:
        _reject_options("optimizer.kind", config.kind, "optimizer", config.options)
        return None
    name = f"optimizer.kind={config.kind}"
    if config.cautious_decay:
        raise OwnCodeError(f"optimizer.cautious_decay=true: {name} has its own decay; set it to false")
    if not _is_optimizer_class(target):
        return partial(_build, name, "build(groups, config)", lambda groups: target(groups, config))
    _check_torch_class(target, name)
    for key in {"lr", "weight_decay"} & config.options.keys():
        raise OwnCodeError(f"optimizer.options.{key}: has no effect; set optimizer.{key}")
    defaults = OptimizerConfig()
    changed = [key for key in ("betas", "eps") if getattr(config, key) != getattr(defaults, key)]
    settings = {"lr": config.lr, **{key: getattr(config, key) for key in changed}, **config.options}
    call = f"{target.__name__}(groups, {', '.join(f'{key}=…' for key in settings)})"
    return partial(_build, name, call, partial(target, **settings))


def _build(name: str, call: str, build: Callable[[Groups], Any], groups: Groups) -> Any:
    try:
        optimizer = build(groups)
    except Exception as error:
        problem = f"{call} fails ({type(error).__name__}: {error})"
        raise OwnCodeError(f"{name}: {problem}; correct it, or optimizer.options") from error
    if not _is_optimizer_class(type(optimizer)):
        returned = "None" if optimizer is None else f"an object of {type(optimizer).__name__}"
        raise OwnCodeError(f"{name}: returned {returned}; return a torch.optim.Optimizer")
    _check_torch_class(type(optimizer), name)
    return optimizer


def layout_problem(optimizer: OptimizerConfig, parallel: ParallelConfig) -> Problem | None:
    """Return the problem of a layout that splits tensors which a user's optimizer reads in full.

    `elementwise = True` allows every layout; False (full parameters are read) excludes tp and zero;
    undeclared (all parameters may be read) excludes pp too. Raises OwnCodeError.
    """
    build = user_optimizer(optimizer)
    if build is None:
        return None
    declared = _is_elementwise(imported("optimizer.kind", optimizer.kind, OPTIMIZERS.shipped, Callable))
    if declared is None:
        declared = _is_elementwise(type(_build_small(optimizer, build)))
    if declared:
        return None
    unsplit = {"tp": 1, "zero": 0} if declared is False else {"tp": 1, "pp": 1, "zero": 0}
    split = {key: size for key in unsplit if (size := getattr(parallel, key)) != unsplit[key]}
    if not split:
        return None
    reads = "declares no `elementwise`" if declared is None else "reads whole parameters"
    fix = f"use {format_settings({key: unsplit[key] for key in split})}"
    if declared is None:
        fix += (
            ", or set elementwise = True on it if the update of an element reads no other element, False if "
            "it reads no other parameter"
        )
    problem = f"optimizer.kind={optimizer.kind}: {reads}, and {format_settings(split)} gives each rank a part"
    return Problem(("optimizer.kind", *split), problem, fix)


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Raise OwnCodeError for an optimizer that cannot be built or take a step."""
    build = user_optimizer(optimizer)
    if build is not None:
        small = _build_small(optimizer, build)
        for group in small.param_groups:
            for p in group["params"]:
                p.grad = p.detach().clone()  # zeros
        check_step(small)


def _build_small(config: OptimizerConfig, build: Callable[[Groups], Any]) -> Any:
    torch = import_module("torch")
    matrix, bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((256, 128), (128,)))
    decays = {"params": [matrix], "weight_decay": config.weight_decay}
    return build([decays, {"params": [bias], "weight_decay": 0.0}])


def check_step(optimizer: Any) -> None:
    """Raise OwnCodeError if a step with gradients of 0 fails, or changes values that checkpoints lack."""
    before = _numbers(optimizer)
    try:
        optimizer.step()
    except Exception as error:
        problem = f"its step() fails with gradients of 0 ({type(error).__name__}: {error})"
        raise OwnCodeError(f"optimizer.kind: {problem}; correct it, or optimizer.options") from error
    for name, value in _numbers(optimizer).items():
        is_same = name in before and getattr(value, "shape", None) == getattr(before[name], "shape", None)
        if is_same:
            equal = value == before[name]
            is_same = bool(equal.all() if hasattr(equal, "all") else equal)
        if not is_same:
            problem = f"its step() changes {name}, which checkpoints do not hold"
            raise OwnCodeError(
                f"optimizer.kind: {problem}; keep a count as self.state[p]['step'] of each parameter"
            )
    check_state(optimizer)


def _numbers(optimizer: Any) -> dict[str, Any]:
    """Numbers and tensors of an optimizer outside its state, which a resumed run would lack."""
    named = {f"self.{name}": value for name, value in vars(optimizer).items()}
    for number, group in enumerate(optimizer.param_groups):
        named |= {f"param_groups[{number}]['{key}']": value for key, value in group.items()}
    copies = {name: value.clone() if hasattr(value, "clone") else value for name, value in named.items()}
    return {
        name: value
        for name, value in copies.items()
        # torch's own steps set flags such as _need_device_dtype_check_for_fused
        if hasattr(value, "item") or (isinstance(value, Real) and not isinstance(value, bool))
    }


def check_state(optimizer: Any) -> None:
    shapes = {id(p): p.shape for group in optimizer.param_groups for p in group["params"]}
    for p, state in optimizer.state.items():
        if id(p) not in shapes:
            raise OwnCodeError(
                f"optimizer.kind: checkpoints cannot hold its state {p!r} of no parameter; {STATE_FIX}"
            )
        for name, value in state.items():
            if name != "step" and value is not None and getattr(value, "shape", None) != shapes[id(p)]:
                raise OwnCodeError(f"optimizer.kind: checkpoints cannot hold its state {name}; {STATE_FIX}")


def _is_optimizer_class(target: object) -> bool:
    bases = target.__mro__ if isinstance(target, type) else ()
    return any((b.__module__, b.__name__) == ("torch.optim.optimizer", "Optimizer") for b in bases)


def _is_elementwise(target: object) -> bool | None:
    """Return `elementwise` of a class or function; None if it declares none."""
    if _is_of_torch(target) and getattr(target, "__name__", None) in TORCH_ELEMENTWISE:
        return True
    value = getattr(target, "elementwise", None)
    return value if isinstance(value, bool) else None


def _check_torch_class(target: type, name: str) -> None:
    if _is_of_torch(target) and target.__name__ not in TORCH_ELEMENTWISE:
        supported = ", ".join(TORCH_ELEMENTWISE)
        raise OwnCodeError(
            f"{name}: {target.__name__} is not supported; use adamw, or of torch.optim {supported}"
        )


def _is_of_torch(target: object) -> bool:
    return isinstance(target, type) and f"{target.__module__}.".startswith("torch.optim.")


def user_decay(schedule: ScheduleConfig) -> Callable[[float], Any] | None:
    """Return the user's decay with its options, None for a shipped one. Raises OwnCodeError."""
    target = imported("schedule.decay", schedule.decay, DECAYS.shipped, Callable)
    if target is None:
        _reject_options("schedule.decay", schedule.decay, "schedule", schedule.options)
        return None
    return partial(target, **schedule.options)


def _reject_options(key: str, kind: str, section: str, options: Mapping[str, object]) -> None:
    for name in options:
        raise OwnCodeError(f"{section}.options.{name}: {key}={kind} takes no options; remove it")


def decay_share(schedule: ScheduleConfig, decay: Callable[[float], Any], progress: float) -> float:
    """Value of a user's decay. Raises OwnCodeError if it is not a number from 0 to 1."""
    name = f"schedule.decay={schedule.decay}: decay({progress:g})"
    try:
        share = decay(progress)
    except Exception as error:
        raise OwnCodeError(f"{name} fails ({type(error).__name__}: {error}); correct it") from error
    value: float = float(share) if isinstance(share, Real) else math.nan
    if not -1e-6 <= value <= 1 + 1e-6:  # less is rounding
        shown = share if isinstance(share, Real) or share is None else f"a {type(share).__name__}"
        raise OwnCodeError(f"{name} is {shown}; return a number from 0 to 1, where 1 is optimizer.lr")
    return min(1.0, max(0.0, value))


def check_decay(schedule: ScheduleConfig) -> None:
    """Raise OwnCodeError for a decay that cannot be called, or yields no learning rate."""
    decay = user_decay(schedule)
    if decay is not None:
        for progress in (0.0, 0.5, 1.0):
            decay_share(schedule, decay, progress)
