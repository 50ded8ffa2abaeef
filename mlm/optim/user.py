"""The user's own optimizers and decays: how they are called, and their problems before a rank starts.

This module imports torch where the user's own code has, so that commands check other settings without it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from numbers import Real
from typing import Any

from mlm.config.imports import OwnCodeError, imported
from mlm.optim.config import DECAYS, OPTIMIZERS, OptimizerConfig, ScheduleConfig
from mlm.parallel.config import ParallelConfig
from mlm.util.errors import Problem, format_settings

Groups = list[dict[str, Any]]
"""Parameters with their settings, as torch.optim takes them."""

TORCH_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "SGD")
"""Classes of torch.optim that work at every layout: the update of an element reads that element alone."""
TORCH_REJECTED = {
    "ASGD": "checkpoints cannot hold its averaging counts",
    "Adafactor": "checkpoints cannot hold its sums over rows and columns",
    "LBFGS": "it computes the loss several times a step",
    "Muon": "it takes whole matrices alone, and optimizer=muon has AdamW for the rest",
    "NAdam": "checkpoints cannot hold its product of momenta",
    "Rprop": "its step sizes do not begin at 0, as state does here",
    "SparseAdam": "it takes sparse gradients alone, and those here are dense",
}
"""Classes of torch.optim that do not work, and why."""
OURS = {"lr", "weight_decay"}
"""Settings of an optimizer that the schedule and the groups set."""
MORE = ("betas", "eps")
"""Settings that a class receives where they are not the default."""
KEPT = "keep tensors shaped like the parameter, and a count `step`"
ROUNDING = 1e-6
"""Distance from 0 to 1 that is rounding in a decay of the user's own."""


def user_optimizer(config: OptimizerConfig) -> Callable[[Groups], Any] | None:
    """Return what builds an optimizer of groups, None for a shipped kind. Both raise OwnCodeError."""
    target = imported("optimizer.kind", config.kind, OPTIMIZERS.shipped, Callable)
    if target is None:
        _no_options("optimizer.kind", config.kind, "optimizer", config.options)
        return None
    name = f"optimizer.kind={config.kind}"
    if config.cautious_decay:
        raise OwnCodeError(f"optimizer.cautious_decay=true: {name} has its own decay; set it to false")
    if _is_optimizer_class(target):
        _check_torch_class(target, name)
        for key in OURS & config.options.keys():
            raise OwnCodeError(f"optimizer.options.{key}: has no effect; set optimizer.{key}")
        usual = OptimizerConfig()
        typed = {key: value for key in MORE if (value := getattr(config, key)) != getattr(usual, key)}
        settings = {"lr": config.lr, **typed, **config.options}
        shown = ", ".join(f"{key}=…" for key in settings)
        fix = "set what it takes by optimizer.options.NAME"
        _bind(target, name, f"{target.__name__}(groups, {shown})", fix, [], **settings)
        return partial(_build, name, partial(target, **settings))
    _bind(target, name, "build(groups, config)", "let it take these two arguments", [], config)
    return partial(_build, name, lambda groups: target(groups, config))


def _build(name: str, build: Callable[[Groups], Any], groups: Groups) -> Any:
    try:
        optimizer = build(groups)
    except Exception as error:
        problem = f"building the optimizer fails ({type(error).__name__}: {error})"
        raise OwnCodeError(f"{name}: {problem}; correct it") from error
    if not _is_optimizer_class(type(optimizer)):
        returned = "None" if optimizer is None else f"an object of {type(optimizer).__name__}"
        raise OwnCodeError(f"{name}: returned {returned}; return a torch.optim.Optimizer")
    _check_torch_class(type(optimizer), name)
    return optimizer


def parameter_groups(decayed: Sequence[Any], plain: Sequence[Any], config: OptimizerConfig) -> Groups:
    """Return the groups that an optimizer is built of: parameters with weight decay, and those without."""
    return [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def layout_problem(optimizer: OptimizerConfig, parallel: ParallelConfig) -> Problem | None:
    """Return the problem of a layout that splits what the user's own optimizer reads as a whole.

    An update of elements one by one is the same at every layout (`elementwise = True`), one of whole
    parameters where tp and zero split none (False), and one that may read all of them where pp does not
    either (undeclared). Raises OwnCodeError.
    """
    build = user_optimizer(optimizer)
    if build is None:
        return None
    declared = _declared(imported("optimizer.kind", optimizer.kind, OPTIMIZERS.shipped, Callable))
    if declared is None:
        declared = _declared(type(_built_small(optimizer, build)))
    if declared:
        return None
    whole = {"tp": 1, "zero": 0} if declared is False else {"tp": 1, "pp": 1, "zero": 0}
    split = {key: size for key in whole if (size := getattr(parallel, key)) != whole[key]}
    if not split:
        return None
    reads = "declares no `elementwise`" if declared is None else "reads whole parameters"
    fix = f"use {format_settings({key: whole[key] for key in split})}"
    if declared is None:
        fix += (
            ", or set elementwise = True on it if the update of an element reads no other element, False if "
            "it reads no other parameter"
        )
    problem = f"optimizer.kind={optimizer.kind}: {reads}, and {format_settings(split)} gives each rank a part"
    return Problem(("optimizer.kind", *split), problem, fix)


def check_step(optimizer: Any) -> None:
    """Raise OwnCodeError if a step with gradients of 0 fails, or leaves what checkpoints do not hold."""
    before = _numbers(optimizer)
    try:
        optimizer.step()
    except Exception as error:
        problem = f"its step() fails with gradients of 0 ({type(error).__name__}: {error})"
        raise OwnCodeError(f"optimizer.kind: {problem}; correct it, or optimizer.options") from error
    after = _numbers(optimizer)
    for name in after:
        if name not in before or not _is_same(after[name], before[name]):
            raise OwnCodeError(
                f"optimizer.kind: its step() changes {name}, which checkpoints do not hold; keep a count as "
                "self.state[p]['step'] of each parameter"
            )
    check_state(optimizer)


def _numbers(optimizer: Any) -> dict[str, Any]:
    """Return the numbers of an optimizer outside its state: of its groups and its attributes."""
    groups = enumerate(optimizer.param_groups)
    named = {f"param_groups[{n}]['{key}']": value for n, group in groups for key, value in group.items()}
    named |= {f"self.{name}": value for name, value in vars(optimizer).items()}
    copies = {name: value.clone() if hasattr(value, "clone") else value for name, value in named.items()}
    is_number = {name: isinstance(value, Real) or hasattr(value, "item") for name, value in copies.items()}
    return {name: value for name, value in copies.items() if is_number[name] and not isinstance(value, bool)}


def _is_same(one: Any, other: Any) -> bool:
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    equal = one == other
    return bool(equal.all() if hasattr(equal, "all") else equal)


def check_state(optimizer: Any) -> None:
    """Raise OwnCodeError for state that checkpoints cannot hold."""
    shapes = {id(p): p.shape for group in optimizer.param_groups for p in group["params"]}
    for p, state in optimizer.state.items():
        if id(p) not in shapes:
            raise OwnCodeError(
                f"optimizer.kind: checkpoints cannot hold its state {p!r} of no parameter; {KEPT}"
            )
        for name, value in state.items():
            if name != "step" and value is not None and getattr(value, "shape", None) != shapes[id(p)]:
                raise OwnCodeError(f"optimizer.kind: checkpoints cannot hold its state {name}; {KEPT}")


def _declared(target: object) -> bool | None:
    if _torch_name(target) in TORCH_ELEMENTWISE:
        return True
    value = getattr(target, "elementwise", None)
    return value if isinstance(value, bool) else None


def _built_small(config: OptimizerConfig, build: Callable[[Groups], Any]) -> Any:
    torch = import_module("torch")
    matrix, bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((256, 128), (128,)))
    return build(parameter_groups([matrix], [bias], config))


def user_decay(schedule: ScheduleConfig) -> Callable[[float], Any] | None:
    """Return the decay of the user's own, None for a shipped one. Raises OwnCodeError."""
    target = imported("schedule.decay", schedule.decay, DECAYS.shipped, Callable)
    if target is None:
        _no_options("schedule.decay", schedule.decay, "schedule", schedule.options)
        return None
    shown = "".join(f", {key}=…" for key in schedule.options)
    _bind(
        target,
        f"schedule.decay={schedule.decay}",
        f"decay(progress{shown})",
        "let it take progress, from 0 to 1, and schedule.options by name",
        0.0,
        **schedule.options,
    )
    return partial(target, **schedule.options)


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


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Raise OwnCodeError for an optimizer that cannot be built."""
    build = user_optimizer(optimizer)
    if build is not None:
        small = _built_small(optimizer, build)
        for group in small.param_groups:
            for p in group["params"]:
                p.grad = p.detach().clone()  # zeros
        check_step(small)


def check_decay(schedule: ScheduleConfig) -> None:
    """Raise OwnCodeError for a decay that cannot be called, or yields no learning rate."""
    decay = user_decay(schedule)
    if decay is not None:
        for progress in (0.0, 0.5, 1.0):
            share_of(schedule, decay, progress)


def _is_optimizer_class(target: object) -> bool:
    bases = target.__mro__ if isinstance(target, type) else ()
    return any((b.__module__, b.__name__) == ("torch.optim.optimizer", "Optimizer") for b in bases)


def _torch_name(target: object) -> str | None:
    """Return the name of a class of torch.optim; None for anything else."""
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
    return name if isinstance(target, type) and f"{module}.".startswith("torch.optim.") else None


def _check_torch_class(target: type, name: str) -> None:
    if (torch_name := _torch_name(target)) in TORCH_REJECTED:
        fix = f"use adamw, or of torch.optim {', '.join(TORCH_ELEMENTWISE)}"
        raise OwnCodeError(f"{name}: {TORCH_REJECTED[str(torch_name)]}; {fix}")


def _no_options(key: str, kind: str, section: str, options: Mapping[str, object]) -> None:
    for name in options:
        raise OwnCodeError(f"{section}.options.{name}: {key}={kind} takes no options; remove it")


def _bind(
    target: Callable[..., Any], name: str, call: str, fix: str, *arguments: object, **named: object
) -> None:
    """Raise OwnCodeError if something cannot be called with these arguments."""
    try:
        parameters = signature(target)
    except (TypeError, ValueError):  # of C, without a signature
        return
    try:
        parameters.bind(*arguments, **named)
    except TypeError as error:
        raise OwnCodeError(f"{name}: cannot be called as {call} ({error}); {fix}") from error
