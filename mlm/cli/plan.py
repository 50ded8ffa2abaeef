"""The commands of `mlm plan`, and the checks of their settings."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mlm.cli.command import Command
from mlm.config.suggest import multiples_around, nearest
from mlm.config.tree import out_of_range, values_of
from mlm.launch.rules.checks import Rule, problems_of
from mlm.launch.rules.layout import RANK_RULES, SCHEDULE_RULES, TRAIN_RULES, Launch, LayoutValues
from mlm.plan.candidates import FIELDS, first_violation, layouts, query_of
from mlm.plan.config import (
    PlanCalibrateConfig,
    PlanCompareConfig,
    PlanDryRunConfig,
    PlanLayoutsConfig,
    PlanMemoryConfig,
    PlanScheduleConfig,
)
from mlm.plan.hardware import find_calibration
from mlm.plan.layout import BATCH_NAMES, DEFAULTS, PlannedLayout
from mlm.runs.checks import SETTINGS_RULES, context_problem
from mlm.util.errors import Problem
from mlm.util.results import folder_problem, is_stream

TABLE_ENDINGS, PICTURES = (".json", ".csv"), (".svg", ".png")
MOST_TRIED = 128  # largest change of gpus= that the search for a valid number tries
MODEL_RULES = tuple(rule for rule in TRAIN_RULES if not set(FIELDS) & set(rule.inputs))
"""Rules that do not depend on the layout."""
DRY_RUN_RULES = tuple(
    rule for rule in TRAIN_RULES if rule not in RANK_RULES or set(rule.inputs) == {"pp", "vp"}
)
"""Conditions of a layout on exactly as many ranks as it needs."""
ANYWHERE = Launch(None, None)
MAX_COMPUTATIONS = 500_000  # per simulation: 15 seconds, three times the largest known runs


def check_plan_schedule(config: PlanScheduleConfig) -> list[Problem]:
    out = _out_ends_in((".json", *PICTURES), "schedule")
    return problems_of(config, ANYWHERE, SCHEDULE_RULES[:1], (_rounds_are_full, _can_be_simulated, out))


def check_plan_layouts(config: PlanLayoutsConfig) -> list[Problem]:
    if outside := out_of_range(config):
        return list(outside.values())
    query = query_of(config)
    rules = (*SETTINGS_RULES, _out_ends_in(TABLE_ENDINGS, "plan"))
    if problems := problems_of(query.run, ANYWHERE, MODEL_RULES, rules):
        return problems
    if problem := context_problem(config.parallel.cp or 1, config.model, config.data):
        return [problem]
    rejected: list[str] = []
    if next(layouts(query, rejected), None):
        return []
    # If any layout is valid on a number of GPUs, one with defaults except tp, pp and dp is.
    plain_values = {name: value for name, value in DEFAULTS.items() if name not in ("tp", "pp", "dp")}
    plain = replace(query, fixed={**plain_values, **query.fixed})
    counts = (n for distance in range(1, MOST_TRIED) for n in (query.gpus - distance, query.gpus + distance))
    valid = next((n for n in counts if n > 0 and next(layouts(replace(plain, gpus=n)), None)), None)
    fixed = " or ".join(f"{BATCH_NAMES.get(name, name)}={value}" for name, value in query.fixed.items())
    fix = f"leave {fixed} to the search" if fixed else "use fewer"
    fix = f"use gpus={valid}" if valid else fix
    return [
        Problem(
            ("gpus", "train.global_batch_size"), f"gpus={query.gpus}: no layout is valid ({rejected[0]})", fix
        )
    ]


def check_plan_compare(config: PlanCompareConfig) -> list[Problem]:
    rules = (*SETTINGS_RULES, _out_ends_in((".json",), "compare"))
    if problems := problems_of(config, ANYWHERE, (), rules):
        return problems
    for key, label in (("a", config.a), ("b", config.b)):
        try:
            layout = PlannedLayout.named(label, config)
        except ValueError as error:
            fix = "write it as `mlm plan layouts` does, such as tp8 pp4 dp16 sp mb2"
            problems.append(Problem((key,), f"{key}={label}: {error}", fix))
            continue
        values = LayoutValues({**values_of(config), **layout.settings(defaults=True)})
        if broken := first_violation(TRAIN_RULES, values, Launch(layout.gpus, None)):
            fix = "use one that `mlm plan layouts` finds"
            problems.append(Problem((key,), f"{key}={label}: {broken.why}", fix))
        elif problem := context_problem(layout.cp, config.model, config.data):
            problems.append(problem)
    return problems


def check_plan_memory(config: PlanMemoryConfig) -> list[Problem]:
    rules = (*SETTINGS_RULES, _rank_exists, _out_ends_in(TABLE_ENDINGS, "memory"))
    return problems_of(config, ANYWHERE, DRY_RUN_RULES, rules)


def check_plan_dry_run(config: PlanDryRunConfig) -> list[Problem]:
    rules = (*SETTINGS_RULES, _rank_exists, _out_ends_in((".json",), "rank"))
    return problems_of(config, ANYWHERE, DRY_RUN_RULES, rules)


def check_plan_calibrate(config: PlanCalibrateConfig) -> list[Problem]:
    return problems_of(config, ANYWHERE, (), (_out_ends_in((".yaml", ".yml"), "hardware"),))


def _rank_exists(config: PlanDryRunConfig, _: Launch) -> Problem | None:
    layout = config.parallel
    ranks = layout.replica * (layout.dp or 1)
    if config.rank < ranks:
        return None
    keys = ("tp", "pp", "dp") if layout.cp == 1 else ("tp", "cp", "pp", "dp")
    typed = " * ".join(f"{key}={getattr(layout, key) or 1}" for key in keys)
    return Problem(
        ("rank", *keys),
        f"rank={config.rank} is none of the {ranks} ranks of {typed}",
        f"use rank=0 to {ranks - 1}" if ranks > 1 else "use rank=0",
    )


def _rounds_are_full(config: PlanScheduleConfig, _: Launch) -> Problem | None:
    pp, vp, micro_batches = config.pp, config.vp, config.micro_batches
    if vp == 1 or config.pipeline != "1f1b" or pp <= 0 or micro_batches % pp == 0:
        return None
    multiples = " or ".join(f"micro_batches={n}" for n in multiples_around(micro_batches, pp))
    return Problem(
        ("micro_batches", "pp", "vp"),
        f"micro_batches={micro_batches} is not a multiple of pp={pp}, as vp={vp} needs",
        f"use {multiples}, or vp=1",
    )


def _can_be_simulated(config: PlanScheduleConfig, _: Launch) -> Problem | None:
    per_micro_batch = (3 if config.pipeline == "zb_h1" else 2) * config.pp * config.vp
    if per_micro_batch * config.micro_batches <= MAX_COMPUTATIONS:
        return None
    most = MAX_COMPUTATIONS // per_micro_batch // config.pp * config.pp
    return Problem(
        ("micro_batches", "pp", "vp"),
        f"micro_batches={config.micro_batches} * pp={config.pp} * vp={config.vp}: more than "
        f"{MAX_COMPUTATIONS:,} computations, which are simulated at most",
        f"use micro_batches={most} or fewer" if most else "use a smaller pp or vp",
    )


def _out_ends_in(allowed: tuple[str, ...], stem: str) -> Rule:
    """Return a rule on the suffix of `out`; `stem` is the proposed file name if it has none."""

    def rule(config: Any, _: Launch) -> Problem | None:
        if config.out is None or is_stream(config.out):
            return None
        out = Path(config.out)
        if out.suffix not in allowed:
            ending = nearest(out.suffix, allowed) or allowed[0]
            fixed = out.parent / f"{out.stem.strip('.') or stem}{ending}"
            why = f"out={config.out} must end in {' or '.join(allowed)}"
            return Problem(("out",), why, f"use out={fixed}")
        return folder_problem(out, makes_folders=True)

    return rule


NO_DEVICES = ("data=synthetic", "cluster=local")
"""Group choices of commands that use no device."""
on_hardware = partial(
    Command,
    fixed_choices=NO_DEVICES,
    file_groups=("hardware",),
    user_files={"hardware=this": find_calibration},
)
BATCH = "data.seq_length train.global_batch_size train.micro_batch_size"
LAYOUT = "tp sequence_parallel pp vp pipeline dp zero zero_reduce recompute"

COMMANDS = (
    on_hardware(
        name="plan layouts",
        spec=PlanLayoutsConfig,
        target="mlm.plan.layouts:run",
        local_check=check_plan_layouts,
        summary="find the fastest layouts of a model on some GPUs",
        about="""Searches the layouts that `mlm pretrain` takes on a number of GPUs, counting the model's own
            modules without a GPU. A key that is set (tp=8) is kept, the others are searched.""",
        examples="""
            # The 8.3 billion model of arXiv:1909.08053 on 64 DGX A100
            mlm plan layouts model=gpt2_8b gpus=512 hardware=dgx_a100_80g
            # What 300 billion tokens take and cost
            mlm plan layouts model=gpt2_8b gpus=64 tokens=300e9 price_per_gpu_hour=2.5
        """,
        keys=f"""
            gpus tokens price_per_gpu_hour show out {BATCH} tp cp pp vp dp sequence_parallel pipeline zero
            recompute
        """,
    ),
    on_hardware(
        name="plan compare",
        spec=PlanCompareConfig,
        target="mlm.plan.layouts:compare",
        local_check=check_plan_compare,
        positional=("a", "b"),
        summary="compare two layouts of a model: which parts of a step make their difference",
        about="""Forecasts a step in two layouts, named as `mlm plan layouts` names them, part by part, and
            their memory and GPU-hours.""",
        examples="""
            # Tensor parallelism against sharded weights
            mlm plan compare 'tp8 pp1 dp64 mb4' 'tp1 pp1 dp512 zero3 mb1' model=gpt2_8b
        """,
        keys="a b out data.seq_length train.global_batch_size",
    ),
    on_hardware(
        name="plan memory",
        spec=PlanMemoryConfig,
        target="mlm.plan.layouts:memory",
        local_check=check_plan_memory,
        summary="show the memory of one layout by part, on any rank, and the device's",
        about="""Memory of a GPU at its fullest moment, counted in the model's own modules, on rank=… and on
            the first and the last pipeline stage.""",
        examples="""
            # A trillion parameters: arXiv:2104.04473, table 1
            mlm plan memory model=gpt2_sc21_1t parallel=sc21_1t hardware=dgx_a100_80g rank=1000
        """,
        keys=f"rank out {BATCH} {LAYOUT}",
    ),
    Command(
        name="plan dry-run",
        fixed_choices=NO_DEVICES,
        spec=PlanDryRunConfig,
        target="mlm.plan.dry_run:run",
        local_check=check_plan_dry_run,
        summary="run a step of any rank of any layout here, without its GPUs; count all it does",
        about="""Runs the trainer of one rank of a layout on tensors without numbers, with the settings of
            `mlm pretrain`. Counted are its parameters, FLOPs, messages, and its memory when it is
            fullest.""",
        examples="""
            # A rank of the trillion of arXiv:2104.04473 on 3,072 GPUs, every number as JSON
            mlm plan dry-run model=gpt2_sc21_1t parallel=sc21_1t precision=bf16 rank=1600 out=rank.json
        """,
        keys=f"rank out {BATCH} {LAYOUT} attention precision.dtype",
    ),
    Command(
        name="plan calibrate",
        spec=PlanCalibrateConfig,
        target="mlm.plan.calibrate:run",
        local_check=check_plan_calibrate,
        summary="measure this machine or cluster, for plans by its own numbers (hardware=this)",
        about="""Measures kernels, collectives and transfers on all ranks at once, in less than two minutes.
            Started plainly it takes every GPU of this host, or its cores; under torchrun or SLURM all hosts,
            and the links between them.""",
        examples="""
            # This machine, for hardware=this
            mlm plan calibrate
            # Two hosts of 8 GPUs (on each of them)
            torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500
                --no-python mlm plan calibrate out=my_cluster.yaml
        """,
    ),
    Command(
        name="plan schedule",
        spec=PlanScheduleConfig,
        target="mlm.plan.schedule:run",
        local_check=check_plan_schedule,
        summary="draw a pipeline schedule, with its bubble and what each rank holds",
        about="""Simulates one training step of a pipeline and draws who computes what when, as figures 3 and
            4 of arXiv:2104.04473. Below stand the bubble (idle over ideal time), the makespan, and the
            micro-batches in flight on each rank.""",
        examples="""
            # Figure 4 of the paper: interleaved 1F1B
            mlm plan schedule pp=4 vp=2 micro_batches=8
            # Zero bubble (ZB-H1): weight gradients fill the gaps; as a picture too
            mlm plan schedule pp=4 micro_batches=8 pipeline=zb_h1 out=schedule.svg
        """,
    ),
)
