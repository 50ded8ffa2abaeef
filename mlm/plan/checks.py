"""What must hold between the settings of `mlm plan`: faults with key, value and nearest valid setting."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from mlm.config.ranges import out_of_range
from mlm.config.suggest import either, multiples_around, nearest
from mlm.files.results import is_stream
from mlm.plan.config import PlanScheduleConfig

ENDINGS = (".svg", ".png", ".json")
MAX_COMPUTATIONS = 500_000  # in one simulation: a quarter of a minute, three times what the largest runs need

Rule = Callable[[PlanScheduleConfig], str | None]


def check_plan_schedule(config: PlanScheduleConfig) -> list[str]:
    """Faults of `mlm plan schedule`. A rule is skipped when one of its own numbers is out of range."""
    faults = out_of_range(asdict(config))
    found = [rule(config) for keys, rule in PLAN_SCHEDULE_RULES if not faults.keys() & set(keys.split())]
    return [*faults.values(), *(fault for fault in found if fault)]


def _interleaves(config: PlanScheduleConfig) -> str | None:
    if config.vp == 1 or config.pipeline != "zb_h1":
        return None
    return f"vp={config.vp}: pipeline=zb_h1 has one chunk per rank; use vp=1, or pipeline=1f1b"


def _rounds_are_full(config: PlanScheduleConfig) -> str | None:
    pp, vp, micro_batches = config.pp, config.vp, config.micro_batches
    if vp == 1 or config.pipeline != "1f1b" or micro_batches % pp == 0:
        return None
    return (
        f"micro_batches={micro_batches} is not a multiple of pp={pp}, as vp={vp} needs; "
        f"use {either('micro_batches', multiples_around(micro_batches, pp))}, or vp=1"
    )


def _can_be_simulated(config: PlanScheduleConfig) -> str | None:
    kinds = 3 if config.pipeline == "zb_h1" else 2
    per_micro_batch = kinds * config.pp * config.vp
    if per_micro_batch * config.micro_batches <= MAX_COMPUTATIONS:
        return None
    most = MAX_COMPUTATIONS // per_micro_batch // config.pp * config.pp
    remedy = f"micro_batches={most} or fewer" if most else "a smaller pp or vp"
    return (
        f"micro_batches={config.micro_batches} * pp={config.pp} * vp={config.vp} make "
        f"{per_micro_batch * config.micro_batches:,} computations, more than the {MAX_COMPUTATIONS:,} "
        f"that can be simulated here; use {remedy}"
    )


def _out_can_be_written(config: PlanScheduleConfig) -> str | None:
    if config.out is None or is_stream(config.out):
        return None
    out = Path(config.out)
    if out.suffix not in ENDINGS:
        ending = nearest(out.suffix, ENDINGS) or ENDINGS[0]
        remedy = out.parent / f"{out.stem.strip('.') or 'schedule'}{ending}"
        if out.name in ENDINGS:
            remedy = out.with_name(f"schedule{out.name}")
        return f"out={config.out} must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}; use out={remedy}"
    if out.is_dir():
        return f"out={config.out} is a folder; use out={out / f'schedule{out.suffix}'}"
    folder = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return None
    return f"out={config.out}: {folder} is no folder that can be written; use out={out.name}"


PLAN_SCHEDULE_RULES: list[tuple[str, Rule]] = [
    ("vp", _interleaves),
    ("pp vp micro_batches", _rounds_are_full),
    ("pp vp micro_batches", _can_be_simulated),
    ("", _out_can_be_written),
]
