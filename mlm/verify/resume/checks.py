"""Checks of the settings of `mlm verify-resume`."""

from dataclasses import fields, replace

from mlm.launch.checks import data_parallel_size
from mlm.parallel.config import ParallelConfig
from mlm.parallel.layout_checks import Launch
from mlm.training.checks import pretraining_problems
from mlm.util.errors import Problem
from mlm.verify.parity.config import comparable
from mlm.verify.resume.config import ResumedLayout, VerifyResumeConfig

RESUMED_NAMES = {f.name: f"resumed.{f.name}" for f in fields(ResumedLayout)}


def check_verify_resume(config: VerifyResumeConfig) -> list[Problem]:
    """Problems of both halves that are visible without this host's devices."""
    anywhere = replace(config.dist, device="auto", backend="auto")
    return problems_here(replace(config, dist=anywhere), local_devices=None)


def problems_here(config: VerifyResumeConfig, *, local_devices: int | None) -> list[Problem]:
    """Problems of both halves: those of the pretraining runs, and what makes them incomparable.

    `local_devices` counts this host's GPUs, None on CPU. A problem of the second half alone names resumed.tp
    where one of the first names tp.
    """
    config = comparable(config)
    launch = Launch(None, local_devices, elsewhere=False)  # the run that is killed must be on this host
    resumed, chosen = config.resumed_run(), {key: RESUMED_NAMES[key] for key in config.resumed.chosen}
    first, second = pretraining_problems(config, launch), pretraining_problems(resumed, launch)
    renamed = pretraining_problems(resumed, launch, names=chosen, fix_names=RESUMED_NAMES)
    later = [named for named, plain in zip(renamed, second, strict=True) if plain not in first]
    return [*first, *later] or _mask_problems(config, local_devices)


def same_layout(config: VerifyResumeConfig, *, local_devices: int | None) -> bool:
    """True if the second half computes as the first does, so that its numbers must have the same bits."""

    def filled_in(parallel: ParallelConfig) -> ParallelConfig:
        dp = data_parallel_size(parallel, world_size=None, local_devices=local_devices)
        return replace(parallel, dp=dp)

    return filled_in(config.parallel) == filled_in(config.resumed_parallel())


def _mask_problems(config: VerifyResumeConfig, local_devices: int | None) -> list[Problem]:
    """Fused attention on a GPU draws masks of its own on each tp rank (mlm/parallel/dropout.py).

    Attention over cp ranks has those of their places, at any layout.
    """
    first, second, model = config.parallel, config.resumed_parallel(), config.model
    if local_devices is None or not model.attention_dropout:
        return []
    if (first.cp > 1) != (second.cp > 1):
        key, old, new = "cp", first.cp, second.cp
    elif first.tp != second.tp and first.cp == 1:
        key, old, new = "tp", first.tp, second.tp
    else:
        return []
    return [
        Problem(
            ("model.attention_dropout", f"resumed.{key}", key),
            f"model.attention_dropout={model.attention_dropout:g} on a GPU draws other masks at "
            f"resumed.{key}={new} than at {key}={old}, so that losses differ by right",
            f"use model.attention_dropout=0 or resumed.{key}={old}",
        )
    ]
