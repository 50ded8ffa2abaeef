"""Checks of the settings of `mlm plan`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from mlm.config.suggest import either, multiples_around, nearest
from mlm.config.tree import out_of_range, values_of
from mlm.data.blend_checks import blend_problems
from mlm.launch.checks import problems_of
from mlm.parallel.layout_checks import (
    MAX_CPU_RANKS,
    RANK_RULES,
    SCHEDULE_RULES,
    TRAIN_RULES,
    Launch,
    LayoutValues,
)
from mlm.parallel.nearest_layout import layout_problems
from mlm.plan.candidates import OPTIONS, Query, first_breach, layouts, query_of
from mlm.plan.config import (
    PlanCalibrateConfig,
    PlanCompareConfig,
    PlanDryRunConfig,
    PlanLayoutsConfig,
    PlanMemoryConfig,
    PlanScheduleConfig,
)
from mlm.plan.layout import DEFAULTS, PlannedLayout
from mlm.training.checks import SETTINGS_RULES, context_problem
from mlm.util.errors import Problem
from mlm.util.results import folder_problem, is_stream, result_problems

ENDINGS = (".svg", ".json")
TABLE_ENDINGS = (".json", ".csv")
HARDWARE_ENDINGS = (".yaml", ".yml")
MOST_TRIED = 128
"""Distance up to which a valid number of GPUs is looked for."""
MODEL_RULES = tuple(rule for rule in TRAIN_RULES if not OPTIONS.keys() & set(rule.reads))
"""Rules that no search can keep by another layout."""
DRY_RUN_RULES = tuple(
    rule for rule in TRAIN_RULES if rule not in RANK_RULES or set(rule.reads) == {"pp", "vp"}
)
"""Conditions of a layout on as many ranks as it asks for."""
PLAIN = {name: value for name, value in DEFAULTS.items() if name not in ("tp", "pp", "dp")}
"""A layout that is valid on some sizes of these if any is."""
MAX_COMPUTATIONS = 500_000  # in one simulation: a quarter of a minute, three times what the largest runs need


def check_plan_schedule(config: PlanScheduleConfig) -> list[Problem]:
    """Problems of `mlm plan schedule`. Those of a number that is out of range itself are left out."""
    outside = out_of_range(config)
    values = {"pp": config.pp, "vp": config.vp, "pipeline": config.pipeline}
    problems = [
        *layout_problems(values, Launch(None, None), SCHEDULE_RULES[:1], outside),
        *(_rounds_are_full(config), _can_be_simulated(config)),
        _out_ends_in(config.out, ENDINGS, "schedule", makes_folders=True),
    ]
    return _without_followups(outside, problems)


def check_plan_layouts(config: PlanLayoutsConfig) -> list[Problem]:
    """Problems of `mlm plan layouts`."""
    outside = out_of_range(config)
    query = query_of(config)
    problems = [rule(query.run, Launch(None, None)) for rule in SETTINGS_RULES]
    problems += [_dtype_has_units(config), _out_ends_in(config.out, TABLE_ENDINGS, "plan")]
    problems += [_price_has_tokens(config)]
    if not any(problems):
        problems.append(context_problem(config.parallel.cp or 1, config.model, config.data))
    problems += layout_problems(query.values, Launch(None, None), MODEL_RULES, outside)
    if not outside and not any(problems):
        problems.append(_some_layout_is_valid(query))
    return _without_followups(outside, problems)


def check_plan_compare(config: PlanCompareConfig) -> list[Problem]:
    """Problems of `mlm plan compare`."""
    outside = out_of_range(config)
    problems = [rule(config, Launch(None, None)) for rule in SETTINGS_RULES]
    problems += [_dtype_has_units(config), _out_ends_in(config.out, (".json",), "compare")]
    if not outside and not any(problems):
        problems += [_layout_is_valid(config, key) for key in ("a", "b")]
    return _without_followups(outside, problems)


def check_plan_memory(config: PlanMemoryConfig) -> list[Problem]:
    """Problems of `mlm plan memory`: those of a dry run, and of the hardware."""
    return _of_rank(config, [_dtype_has_units(config), _out_ends_in(config.out, TABLE_ENDINGS, "memory")])


def check_plan_dry_run(config: PlanDryRunConfig) -> list[Problem]:
    """Problems of `mlm plan dry-run`."""
    return _of_rank(config, [_out_ends_in(config.out, (".json",), "rank", makes_folders=True)])


def _of_rank(
    config: PlanMemoryConfig | PlanDryRunConfig, problems: Iterable[Problem | None]
) -> list[Problem]:
    """Problems of `mlm pretrain` without its devices and files, of the rank, and others."""
    found = problems_of(
        config, Launch(None, None), DRY_RUN_RULES, (*SETTINGS_RULES, _rank_exists, _data_is_made_here)
    )
    return [*found, *blend_problems(config.data), *filter(None, problems)]


def check_plan_calibrate(config: PlanCalibrateConfig) -> list[Problem]:
    """Problems of `mlm plan calibrate`."""
    outside = out_of_range(config)
    ending = _out_ends_in(config.out, HARDWARE_ENDINGS, "hardware")
    kept = () if ending else result_problems(config.out)
    return _without_followups(
        outside, [_ranks_fit(config), ending, *(Problem(("out",), line) for line in kept)]
    )


def _ranks_fit(config: PlanCalibrateConfig) -> Problem | None:
    """The problem of more ranks than one host is started with."""
    if config.ranks is None or config.ranks <= MAX_CPU_RANKS:
        return None
    problem = f"ranks={config.ranks}: one host is started with {MAX_CPU_RANKS} at most"
    return Problem(("ranks",), problem, f"use ranks={MAX_CPU_RANKS} or less, or start ranks with torchrun")


def _without_followups(outside: Mapping[str, Problem], problems: Iterable[Problem | None]) -> list[Problem]:
    """Problems without those that follow from a number out of range."""
    return [*outside.values(), *(each for each in problems if each and not each.concerns(outside))]


def _dtype_has_units(config: PlanLayoutsConfig | PlanCompareConfig | PlanMemoryConfig) -> Problem | None:
    dtype, peaks = config.precision.dtype, config.hardware.peak_tflops
    if getattr(peaks, dtype) is not None:
        return None
    known = [name for name in ("bf16", "fp16", "fp32", "fp64") if getattr(peaks, name) is not None]
    if not known:
        problem = f"hardware.peak_tflops of {config.hardware.name} are all null"
        section, key = "hardware.peak_tflops", f"hardware.peak_tflops.{dtype}"
        return Problem((section, key), problem, f"add {key}=…")
    problem = f"precision={dtype}: {config.hardware.name} has no peak_tflops.{dtype}"
    keys = ("precision", "hardware", f"hardware.peak_tflops.{dtype}")
    return Problem(keys, problem, f"use {either('precision', known)}")


def _price_has_tokens(config: PlanLayoutsConfig) -> Problem | None:
    if config.price_per_gpu_hour is None or config.tokens is not None:
        return None
    problem = f"price_per_gpu_hour={config.price_per_gpu_hour:g}: no number of tokens to train on"
    return Problem(("price_per_gpu_hour", "tokens"), problem, "add tokens=…, such as tokens=300e9")


def _some_layout_is_valid(query: Query) -> Problem | None:
    rejected: list[str] = []
    if next(layouts(query, rejected), None):
        return None
    plain = replace(query, fixed={**PLAIN, **query.fixed})
    near = (n for distance in range(1, MOST_TRIED) for n in (query.gpus - distance, query.gpus + distance))
    valid = next((n for n in near if n > 0 and next(layouts(replace(plain, gpus=n)), None)), None)
    kept = " or ".join(f"{name}={value}" for name, value in query.fixed.items())
    keys = ("gpus", "train.global_batch_size")
    fix = f"use gpus={valid}" if valid else f"leave {kept} to the search"
    return Problem(keys, f"gpus={query.gpus}: no layout is valid ({rejected[0]})", fix)


def _rank_exists(config: PlanMemoryConfig | PlanDryRunConfig, _: Launch) -> Problem | None:
    layout = config.parallel
    ranks = layout.replica * (layout.dp or 1)
    if (config.rank or 0) < ranks:
        return None
    keys = ("tp", "pp", "dp") if layout.cp == 1 else ("tp", "cp", "pp", "dp")
    typed = " * ".join(f"{key}={getattr(layout, key) or 1}" for key in keys)
    return Problem(
        ("rank", *keys),
        f"rank={config.rank} is none of the {ranks} ranks of {typed}",
        f"use rank=0 to {ranks - 1}" if ranks > 1 else "use rank=0",
    )


def _layout_is_valid(config: PlanCompareConfig, key: str) -> Problem | None:
    label = getattr(config, key)
    try:
        layout = PlannedLayout.named(label, config.train.global_batch_size)
    except ValueError as error:
        fix = "write it as `mlm plan layouts` does, such as tp8 pp4 dp16 sp mb2"
        return Problem((key,), f"{key}={label}: {error}", fix)
    values = LayoutValues({**values_of(config), **layout.settings(defaults=True)})
    if broken := first_breach(TRAIN_RULES, values, Launch(layout.gpus, None)):
        return Problem((key,), f"{key}={label}: {broken.why}", "use one that `mlm plan layouts` finds")
    return context_problem(layout.cp, config.model, config.data)


def _data_is_made_here(config: PlanMemoryConfig | PlanDryRunConfig, _: Launch) -> Problem | None:
    if config.data.kind != "indexed":
        return None
    return Problem(
        ("data.kind", "data.path"),
        "data.kind=indexed reads a corpus, of which a dry run needs nothing but data.seq_length",
        "use data=synthetic",
    )


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
    each = (3 if config.pipeline == "zb_h1" else 2) * config.pp * config.vp
    if each * config.micro_batches <= MAX_COMPUTATIONS:
        return None
    most = MAX_COMPUTATIONS // each // config.pp * config.pp if config.pp > 0 < config.vp else 0
    return Problem(
        ("micro_batches", "pp", "vp"),
        f"micro_batches={config.micro_batches} * pp={config.pp} * vp={config.vp} make "
        f"{each * config.micro_batches:,} computations, more than the {MAX_COMPUTATIONS:,} simulated here",
        f"use micro_batches={most} or fewer" if most else "use a smaller pp or vp",
    )


def _out_ends_in(
    out_typed: str | None, allowed: tuple[str, ...], stem: str, *, makes_folders: bool = False
) -> Problem | None:
    """The problem of a result whose ending is not `allowed`; `stem` is the name proposed for one without."""
    if out_typed is None or is_stream(out_typed):
        return None
    out = Path(out_typed)
    if out.suffix not in allowed:
        ending = nearest(out.suffix, allowed) or allowed[0]
        fixed = out.parent / f"{out.stem.strip('.') or stem}{ending}"
        if out.name in allowed:
            fixed = out.with_name(f"{stem}{out.name}")
        return Problem(("out",), f"out={out_typed} must end in {' or '.join(allowed)}", f"use out={fixed}")
    if out.is_dir():
        return Problem(("out",), f"out={out_typed} is a folder", f"use out={out / f'{stem}{out.suffix}'}")
    return folder_problem(out, makes_folders=makes_folders)
