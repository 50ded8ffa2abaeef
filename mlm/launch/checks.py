"""Checks of a command that runs on ranks: bounds, layout, and the rules of the command.

The checks look at numbers, and at whether named files exist; what is inside the files is for the preflight
of each command. Layouts have their rules in parallel/layout_checks.py. A rule is skipped when one of its own
numbers is out of range, which is an error already.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from mlm.config.ranges import out_of_range
from mlm.config.tree import HOISTED, flatten
from mlm.parallel.config import ParallelConfig
from mlm.parallel.layout_checks import Launch, LayoutRule, num_replicas
from mlm.parallel.nearest_layout import layout_faults

Rule = Callable[[Any, Launch], str | None]


def errors_of(
    config: Any, launch: Launch, layout_rules: Iterable[LayoutRule], rules: Iterable[tuple[str, Rule]]
) -> list[str]:
    values = {key.removeprefix(f"{HOISTED}."): value for key, value in flatten(asdict(config)).items()}
    faults = out_of_range(values)
    found = [rule(config, launch) for keys, rule in rules if not faults.keys() & set(keys.split())]
    return [
        *faults.values(),
        *layout_faults(values, launch, layout_rules, faults.keys()),
        *(fault for fault in found if fault),
    ]


def data_parallel_size(parallel: ParallelConfig, *, world_size: int | None, local_devices: int | None) -> int:
    """dp with its default filled in: what tp * pp leave of the world, of this host's GPUs, or 1 on CPU."""
    return num_replicas(parallel.tp, parallel.pp, parallel.dp, Launch(world_size, local_devices))


def devices_are_there(config: Any, launch: Launch) -> str | None:
    device, backend = config.dist.device, config.dist.backend
    if device == "cuda" and launch.local_devices is None:
        return "dist.device=cuda, but this host has no GPU that torch can use; use dist.device=auto"
    if backend == "nccl" and launch.local_devices is None:
        return "dist.backend=nccl runs on GPUs, and this run is on CPU; use dist.backend=auto or gloo"
    return None


def loss_scale_can_fall(config: Any, _: Launch) -> str | None:
    precision = config.precision
    if precision.min_loss_scale <= precision.initial_loss_scale:
        return None
    return (
        f"precision.min_loss_scale={precision.min_loss_scale:g} is more than "
        f"precision.initial_loss_scale={precision.initial_loss_scale:g}; use precision.min_loss_scale=1"
    )


def lr_falls(config: Any, _: Launch) -> str | None:
    low, peak = config.schedule.min_lr, config.optimizer.lr
    if config.schedule.decay == "constant" or low <= peak:
        return None
    return (
        f"schedule.min_lr={low:g} is more than optimizer.lr={peak:g}, the peak; "
        f"use schedule.min_lr={peak / 10:g}"
    )
