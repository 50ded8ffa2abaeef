"""Checks of a command that runs on ranks: bounds, layout, and the rules of the command.

They compare numbers and look for named files; a command's preflight reads the files. launch/rules/layout.py
has the rules of layouts.
"""

from collections.abc import Callable, Iterable
from typing import Any

from mlm.config.tree import out_of_range, values_of
from mlm.data import files_present
from mlm.launch.config import NO_GPU, NO_GPU_FIX
from mlm.launch.rules.layout import Launch, LayoutRule
from mlm.launch.rules.nearest import layout_problems
from mlm.util.errors import Absent, Problem

Rule = Callable[[Any, Launch], Problem | None]
"""A condition of a command's settings, which must accept any numbers."""


def problems_of(
    config: Any,
    launch: Launch,
    layout_rules: Iterable[LayoutRule],
    rules: Iterable[Rule],
) -> list[Problem]:
    """Problems of a configuration; a number out of range has no further ones."""
    outside = out_of_range(config)
    broken = (rule(config, launch) for rule in rules)
    return [
        *outside.values(),
        *layout_problems(values_of(config), launch, layout_rules, outside),
        *(problem for problem in broken if problem and not problem.concerns(outside)),
    ]


def checked_by(layout_rules: Iterable[LayoutRule], rules: Iterable[Rule]) -> Callable[..., list[Problem]]:
    """Return a `Command.check` of these rules."""

    def check(config: Any, *, world_size: int | None, local_devices: int | None) -> list[Problem]:
        return problems_of(config, Launch(world_size, local_devices), layout_rules, rules)

    return check


def devices_exist(config: Any, launch: Launch) -> Problem | None:
    device, backend = config.dist.device, config.dist.backend
    if device == "cuda" and launch.local_devices is None:
        return Absent(("dist.device",), f"dist.device=cuda, but {NO_GPU}", NO_GPU_FIX)
    if backend == "nccl" and launch.local_devices is None:
        return Absent(
            ("dist.backend",),
            "dist.backend=nccl runs on GPUs, and this run is on CPU",
            "use dist.backend=auto or gloo",
        )
    return None


def checkpoint_exists(config: Any, _: Launch) -> Problem | None:
    return files_present.model(config.ckpt)


def tokenizer_exists(config: Any, _: Launch) -> Problem | None:
    return files_present.tokenizer("tokenizer", config.tokenizer)


def loss_scale_can_fall(config: Any, _: Launch) -> Problem | None:
    low, first = config.precision.min_loss_scale, config.precision.initial_loss_scale
    if low <= first:
        return None
    return Problem(
        ("precision.min_loss_scale", "precision.initial_loss_scale"),
        f"precision.min_loss_scale={low:g} is more than precision.initial_loss_scale={first:g}",
        "use precision.min_loss_scale=1",
    )


def lr_falls(config: Any, _: Launch) -> Problem | None:
    """The problem of a learning rate that would end above its peak."""
    return None if config.schedule.decay == "constant" else min_lr_problem(config)


def min_lr_problem(config: Any) -> Problem | None:
    low, peak = config.schedule.min_lr, config.optimizer.lr
    if low <= peak:
        return None
    return Problem(
        ("schedule.min_lr", "optimizer.lr"),
        f"schedule.min_lr={low:g} is more than optimizer.lr={peak:g}, the peak",
        f"use schedule.min_lr={peak / 10:g}",
    )
