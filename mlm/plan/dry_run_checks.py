"""Checks of the settings of `mlm plan dry-run`: those of `mlm pretrain`, without its devices and files."""

from pathlib import Path

from mlm.data.blend_checks import blend_problems
from mlm.launch.checks import problems_of
from mlm.parallel.layout_checks import RANK_RULES, TRAIN_RULES, Launch
from mlm.plan.checks import UNSPLIT_CONTEXT
from mlm.plan.config import PlanDryRunConfig
from mlm.training.checks import SETTINGS_RULES
from mlm.util.errors import Problem
from mlm.util.results import folder_problem, is_stream

LAYOUT_RULES = (
    *(rule for rule in TRAIN_RULES if rule not in RANK_RULES or set(rule.reads) == {"pp", "vp"}),
    UNSPLIT_CONTEXT,
)
"""Conditions of a layout on as many ranks as it asks for."""


def check_plan_dry_run(config: PlanDryRunConfig) -> list[Problem]:
    """Problems of `mlm plan dry-run`. Those of a number that is out of range itself are left out."""
    rules = (*SETTINGS_RULES, _rank_exists, _data_is_made_here, _out_can_be_written)
    return [*problems_of(config, Launch(None, None), LAYOUT_RULES, rules), *blend_problems(config.data)]


def num_ranks(config: PlanDryRunConfig) -> int:
    """Ranks of the layout; dp=null is one replica."""
    return config.parallel.tp * config.parallel.pp * (config.parallel.dp or 1)


def _rank_exists(config: PlanDryRunConfig, _: Launch) -> Problem | None:
    ranks, layout = num_ranks(config), config.parallel
    if config.rank < ranks:
        return None
    typed = " * ".join(f"{key}={getattr(layout, key) or 1}" for key in ("tp", "pp", "dp"))
    return Problem(
        ("rank", "tp", "pp", "dp"),
        f"rank={config.rank} is none of the {ranks} ranks of {typed}",
        f"use rank=0 to {ranks - 1}" if ranks > 1 else "use rank=0",
    )


def _data_is_made_here(config: PlanDryRunConfig, _: Launch) -> Problem | None:
    if config.data.kind != "indexed":
        return None
    return Problem(
        ("data.kind", "data.path"),
        "data.kind=indexed reads a corpus, of which a dry run needs nothing but data.seq_length",
        "use data=synthetic",
    )


def _out_can_be_written(config: PlanDryRunConfig, _: Launch) -> Problem | None:
    if config.out is None or is_stream(config.out):
        return None
    out = Path(config.out)
    if out.suffix != ".json":
        fixed = out.parent / f"{out.stem.strip('.') or 'rank'}.json"
        return Problem(("out",), f"out={config.out} must end in .json", f"use out={fixed}")
    if out.is_dir():
        return Problem(("out",), f"out={config.out} is a folder", f"use out={out / 'rank.json'}")
    return folder_problem(out, makes_folders=True)
