"""Checks of `mlm reproduce` before it starts: the experiment's name, the folder, and the user's texts."""

from collections.abc import Sequence

from mlm.config.suggest import did_you_mean
from mlm.errors import Problem, UserError
from mlm.evaluate.zero_shot import sources
from mlm.files.ownership import claim_problems
from mlm.reproduce.catalogue import EXPERIMENTS
from mlm.reproduce.config import ReproduceConfig

KIND = "reproduce"
ALL = "all"


def preflight(config: ReproduceConfig) -> Sequence[str]:
    """Return problems of the name, the folder and the texts to evaluate on. Raises CorruptFileError."""
    names = [experiment.name for experiment in EXPERIMENTS]
    if config.name is None:
        return []
    if config.name not in (*names, ALL):
        fix = f"use {ALL}, or one that `mlm reproduce` lists{did_you_mean(config.name, [*names, ALL])}"
        return [Problem.at("name", config.name, "is no experiment", fix)]
    return [*claim_problems(config.out, KIND), *text_problems(config)]


def text_problems(config: ReproduceConfig) -> list[str]:
    """Return problems of the files of WikiText and LAMBADA, by reading them. Raises CorruptFileError."""
    found = list[str]()
    try:
        if config.wikitext is not None:
            sources.wikitext(config.wikitext, raw=False, key="wikitext")
        if config.lambada is not None:
            sources.lambada(config.lambada, standard=False, key="lambada")
    except UserError as error:
        found += error.problems
    return found
