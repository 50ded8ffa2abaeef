"""Checks of the settings of `mlm plan`."""

from pathlib import Path

from mlm.config.suggest import either, multiples_around, nearest
from mlm.config.tree import out_of_range
from mlm.errors import Problem
from mlm.files.results import folder_problem, is_stream
from mlm.plan.config import PlanScheduleConfig

ENDINGS = (".svg", ".png", ".json")
MAX_COMPUTATIONS = 500_000  # in one simulation: a quarter of a minute, three times what the largest runs need


def check_plan_schedule(config: PlanScheduleConfig) -> list[Problem]:
    """Problems of `mlm plan schedule`. Those of a number that is out of range itself are left out."""
    outside = out_of_range(config)
    rules = (_interleaves, _rounds_are_full, _can_be_simulated, _out_can_be_written)
    found = (rule(config) for rule in rules)
    return [
        *outside.values(),
        *(problem for problem in found if problem and not problem.concerns(outside)),
    ]


def _interleaves(config: PlanScheduleConfig) -> Problem | None:
    if config.vp == 1 or config.pipeline != "zb_h1":
        return None
    problem = f"vp={config.vp}: pipeline=zb_h1 has one chunk per rank"
    return Problem(("vp", "pipeline"), problem, "use vp=1, or pipeline=1f1b")


def _rounds_are_full(config: PlanScheduleConfig) -> Problem | None:
    pp, vp, micro_batches = config.pp, config.vp, config.micro_batches
    if vp == 1 or config.pipeline != "1f1b" or pp <= 0 or micro_batches % pp == 0:
        return None
    return Problem(
        ("micro_batches", "pp", "vp"),
        f"micro_batches={micro_batches} is not a multiple of pp={pp}, as vp={vp} needs",
        f"use {either('micro_batches', multiples_around(micro_batches, pp))}, or vp=1",
    )


def _can_be_simulated(config: PlanScheduleConfig) -> Problem | None:
    kinds = 3 if config.pipeline == "zb_h1" else 2
    per_micro_batch = kinds * config.pp * config.vp
    if per_micro_batch * config.micro_batches <= MAX_COMPUTATIONS:
        return None
    most = MAX_COMPUTATIONS // per_micro_batch // config.pp * config.pp if config.pp > 0 < config.vp else 0
    return Problem(
        ("micro_batches", "pp", "vp"),
        f"micro_batches={config.micro_batches} * pp={config.pp} * vp={config.vp} make "
        f"{per_micro_batch * config.micro_batches:,} computations, more than the {MAX_COMPUTATIONS:,} "
        "that can be simulated here",
        f"use micro_batches={most} or fewer" if most else "use a smaller pp or vp",
    )


def _out_can_be_written(config: PlanScheduleConfig) -> Problem | None:
    if config.out is None or is_stream(config.out):
        return None
    out = Path(config.out)
    if out.suffix not in ENDINGS:
        ending = nearest(out.suffix, ENDINGS) or ENDINGS[0]
        fixed = out.parent / f"{out.stem.strip('.') or 'schedule'}{ending}"
        if out.name in ENDINGS:
            fixed = out.with_name(f"schedule{out.name}")
        endings = f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        return Problem(("out",), f"out={config.out} must end in {endings}", f"use out={fixed}")
    if out.is_dir():
        return Problem(("out",), f"out={config.out} is a folder", f"use out={out / f'schedule{out.suffix}'}")
    return folder_problem(out, makes_folders=True)
