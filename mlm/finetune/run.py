"""`mlm finetune TASK`: train a head, and the model below it, on a task; keep the best checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.save_load import CheckpointError
from mlm.config.build import from_dict
from mlm.finetune.batches import draw_rows
from mlm.finetune.config import FinetuneConfig
from mlm.finetune.inputs import (
    Start,
    change_problems,
    depends_on,
    read_splits,
    read_start,
    tokenize_split,
)
from mlm.finetune.results import RESULT, Result, finished, report
from mlm.finetune.splits import TaskSplit
from mlm.finetune.task_type import check_installed
from mlm.finetune.training import Material, finetune, pretrain_config
from mlm.inference.trained import open_for_layout
from mlm.launch.stop import stopping_at_once
from mlm.parallel.mesh import ParallelContext
from mlm.tracking.config import missing_extras
from mlm.training.memory import reuse_large_blocks
from mlm.training.preflight import run_start_problems
from mlm.util.errors import ConfigError, UserError, attempt
from mlm.util.ownership import claim_problems


def preflight(config: FinetuneConfig) -> list[str]:
    """Return the problems that reading the named files shows; called before any rank starts."""
    problems = [*missing_extras(config.log)]
    source = attempt(problems, lambda: open_for_layout(config.ckpt, config.parallel))
    start = None if problems else attempt(problems, lambda: read_start(config, source))
    attempt(problems, lambda: check_installed(config.task))
    splits = attempt(problems, lambda: read_splits(config, None if config.data.bad_rows == "skip" else start))
    if problems or start is None or splits is None:
        return problems
    try:
        if config.seeds > 1:
            problems += claim_problems(config.out, "run", writes=(RESULT,))
        problems += length_problems(config, start)
        for one in configs_by_seed(config):
            problems += run_start_problems(pretrain_config(one, start, 1), compares=False)
            problems += change_problems(one, depends_on(one, start, splits))
    except UserError as error:
        return list(error.problems)
    return problems


def length_problems(config: FinetuneConfig, start: Start) -> list[str]:
    """Return the problem of a longest text that does not fit the model when padded."""
    tp, limit = config.parallel.tp, start.model.max_positions
    if not config.parallel.sequence_parallel or -(-start.max_length // tp) * tp <= limit:
        return []
    return [
        f"task.max_length={start.max_length}: sequence_parallel=true pads texts to a multiple of tp={tp}, "
        f"and the model reads {limit} tokens: use task.max_length={limit // tp * tp} or less"
    ]


def run(config: FinetuneConfig, ctx: ParallelContext) -> int:
    """Finetune, with each seed; every rank calls this. Return the command's exit code. Raises UserError."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    start, splits, runs = read_start(config), read_splits(config), configs_by_seed(config)
    ranks = Ranks.of(ctx)

    def look() -> list[Any]:
        if not ctx.is_main:  # one rank looks: two might see different things on a shared disk
            return []
        wanted = [depends_on(one, start, splits) for one in runs]
        results = [finished(one, settings) for one, settings in zip(runs, wanted, strict=True)]
        return [[settings, r and asdict(r)] for settings, r in zip(wanted, results, strict=True)]

    def explain(error: Exception) -> UserError:
        return CheckpointError(f"ckpt={config.ckpt}, out={config.out}: cannot be read ({error}): fix it")

    seen = ranks.broadcast(ranks.together(look, explain))
    results = [None if r is None else from_dict(Result, r) for _, r in seen]
    is_new = None in results
    with stopping_at_once("stopped before training"):
        material = prepare(config, start, splits) if is_new else None
    for n, one in enumerate(runs):
        if results[n] is None and material is not None:
            results[n], stopped = finetune(one, seen[n][0], material, ctx)
            if stopped is not None and None in results:
                return stopped
    if ctx.is_main:
        report(config, [r for r in results if r is not None], is_new=is_new)
    return 0


def configs_by_seed(config: FinetuneConfig) -> list[FinetuneConfig]:
    """Return the runs of a command: one, or one per seed, each in a separate folder."""
    if config.seeds == 1:
        return [config]
    seeds = range(config.seed, config.seed + config.seeds)
    return [replace(config, seed=s, seeds=1, out=str(Path(config.out, f"seed-{s}"))) for s in seeds]


def prepare(config: FinetuneConfig, start: Start, splits: Mapping[str, TaskSplit]) -> Material:
    """Tokenise the rows. Raises UserError."""
    task, train, wanted = config.task, splits[config.task.train], config.data.train_rows
    if wanted is not None:
        train = train.select(draw_rows(len(train), wanted, config.data.seed).tolist())
    tests, problems = task.tests if config.data.predict_tests else (), list[str]()
    wanted_splits = [train, *(splits[name] for name in (*task.validations, *tests))]
    found = [attempt(problems, partial(tokenize_split, task, split, start)) for split in wanted_splits]
    if problems:
        raise ConfigError(problems)
    first, *others = (each for each in found if each is not None)
    size = len(task.validations)
    return Material(start=start, train=first, validations=others[:size], tests=others[size:])
