"""Checks of `mlm reproduce` before it starts: the experiment's name, the folder, and the user's texts."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from mlm.config.suggest import did_you_mean
from mlm.evaluate.zero_shot import sources
from mlm.finetune.sources import find_files
from mlm.reproduce.catalogue import EXPERIMENTS
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.corpus import corpus_problems
from mlm.reproduce.experiment import Step
from mlm.reproduce.logged import steps_of
from mlm.reproduce.nanogpt import shakespeare
from mlm.reproduce.v1 import table5
from mlm.util.errors import Problem, UserError
from mlm.util.ownership import claim_problems

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
    chosen = [each for each in EXPERIMENTS if config.name in (each.name, ALL)]
    steps = [step for each in chosen for step in each.steps(config)]
    return [
        *claim_problems(config.out, KIND),
        *device_problems(config, steps),
        *text_problems(config),
        *folder_problems(config),
        *corpus_problems(config, steps),
    ]


def device_problems(config: ReproduceConfig, steps: Sequence[Step]) -> list[Problem]:
    """Return the problem of a host without the GPUs that steps train on."""
    here = torch.cuda.device_count()
    wanted = max((ranks_of(step.words) for step in steps if steps_of(step.words)), default=0)
    if config.scale != "node" or here >= wanted:
        return []
    fix = "use scale=laptop, or scale=paper for the commands of a cluster"
    return [Problem.at("scale", config.scale, f"trains on {wanted} GPUs, and there are {here}", fix)]


def ranks_of(words: Sequence[str]) -> int:
    """Return the ranks of a command's layout."""
    sizes = dict(word.split("=", 1) for word in words if word.startswith(("tp=", "pp=", "dp=", "cp=")))
    return prod(int(size) for size in sizes.values())


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


def folder_problems(config: ReproduceConfig) -> list[str]:
    """Return problems of the folders of GLUE and nanoGPT: files that their experiments need."""
    found = list[str]()
    for split in ("train", "validation") if config.glue is not None else ():
        folder = table5.task_folder(config)
        try:
            find_files(folder, split, ())
        except UserError:
            fix = f"give a folder with {folder.name}/train.jsonl and {folder.name}/validation.jsonl"
            found.append(Problem.at("glue", config.glue, f"has no split {split} of {folder.name}", fix))
    if config.peer is not None:
        missing = [name for name in shakespeare.CHECKOUT if not (Path(config.peer) / name).is_file()]
        if missing:
            found.append(
                Problem.at("peer", config.peer, f"has no {missing[0]}", "give a checkout of karpathy/nanoGPT")
            )
    return found
