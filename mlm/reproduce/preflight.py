"""Checks of `mlm reproduce` before it starts: the experiment's name, and the folder."""

from collections.abc import Sequence

from mlm.config.suggest import did_you_mean
from mlm.errors import Problem
from mlm.files.ownership import claim_problems
from mlm.reproduce.catalogue import EXPERIMENTS
from mlm.reproduce.config import ReproduceConfig

KIND = "reproduce"
ALL = "all"


def preflight(config: ReproduceConfig) -> Sequence[str]:
    """Return problems of the name and the folder."""
    names = [experiment.name for experiment in EXPERIMENTS]
    if config.name is None:
        return []
    if config.name not in (*names, ALL):
        fix = f"use {ALL}, or one that `mlm reproduce` lists{did_you_mean(config.name, [*names, ALL])}"
        return [Problem.at("name", config.name, "is no experiment", fix)]
    return claim_problems(config.out, KIND)
