"""`mlm eval TASK`: score a finetuned checkpoint on a split of its task, or write its predictions."""

import json
import os
from pathlib import Path
from typing import Any

import torch

import mlm
from mlm.checkpoint.save_load import read_manifest
from mlm.config.build import to_dict
from mlm.config.downstream_schema import TaskConfig
from mlm.config.errors import ConfigError, UserError, writing_to
from mlm.config.finetune_schema import EvalTaskConfig, FinetuneConfig
from mlm.files import write_atomic
from mlm.parallel.mesh import ParallelContext
from mlm.tasks.finetune.best import STATE, best_of
from mlm.tasks.finetune.kinds import KINDS
from mlm.tasks.finetune.material import Start, dealing_of, evaluation_of, start_of
from mlm.tasks.finetune.metrics import check_installed
from mlm.tasks.finetune.objective import Finetuning
from mlm.tasks.finetune.outputs import evaluate
from mlm.tasks.finetune.rows import Split, read_split
from mlm.tasks.finetune.submission import write_predictions
from mlm.tasks.trained import (
    Named,
    checkpoint_faults,
    is_model_folder,
    load_trained,
    named_checkpoint,
    result_file,
)
from mlm.terminal import add_row, console, count_progress, plain, table
from mlm.train.pipelined import PipelinedModel

READ_ALIKE = ("kind", "labels", "max_length", "question_length", "doc_stride")
"""Settings of a task that a checkpoint was finetuned with and must be scored with."""


def preflight(config: EvalTaskConfig) -> list[str]:
    """Faults that reading the named files shows; called before any rank starts."""
    ckpt = best_of(config.ckpt)
    faults = checkpoint_faults(ckpt, config.parallel)
    if faults:
        return faults
    try:
        check_installed(config.task)
        named = named_checkpoint(ckpt)
        if fault := head_fault(config, named):
            return [fault]
        start_of(config, named)
        for name in splits(config):
            read_split(config.task, name, path=config.data.path)
    except ConfigError as error:
        return list(error.faults)
    except UserError as error:
        return str(error).splitlines()
    folder = result_path(config, named).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return [f"out={config.out}: {folder} is no folder that can be written"]
    return []


def head_fault(config: EvalTaskConfig, named: Named) -> str | None:
    """Whether the model was finetuned on another task, or on this one with other settings."""
    task, model, kind = config.task, named.config.model, KINDS[config.task.kind]
    if (model.head, model.num_labels) != (kind.head, kind.num_labels(task)):
        return (
            f"ckpt={config.ckpt} has head={model.head} with {model.num_labels} labels, and {task.name} needs "
            f"head={kind.head} with {kind.num_labels(task)}: finetune it with `mlm finetune {task.name}`"
        )
    if is_model_folder(named.path):
        return None
    saved = read_manifest(named.path).state.get(STATE, {}).get("task", {})
    if saved.get("name", task.name) != task.name:
        return (
            f"ckpt={config.ckpt} was finetuned on {saved['name']}, not on {task.name}: use "
            f"`mlm eval {saved['name']}`"
        )
    mine = to_dict(task)
    for key in READ_ALIKE:
        if saved.get(key, mine[key]) != mine[key]:
            return (
                f"task.{key}={mine[key]}: ckpt={config.ckpt} was finetuned with {saved[key]}; use "
                f"task.{key}={saved[key]}"
            )
    return None


def splits(config: EvalTaskConfig) -> tuple[str, ...]:
    """The splits to score."""
    return config.task.validations if config.split is None else (config.split,)


def result_path(config: EvalTaskConfig, named: Named) -> Path:
    """Where the JSON receipt goes: in the run directory, beside the folder of the best checkpoint."""
    if config.out is not None:
        return Path(config.out)
    name = f"eval-{config.task.name}.json"
    if best_of(config.ckpt) != config.ckpt:
        return Path(config.ckpt, name)
    return result_file(named.path, name)


def run(config: EvalTaskConfig, ctx: ParallelContext) -> None:
    """Score the splits; rank 0 prints a table and writes a JSON receipt."""
    ckpt = best_of(config.ckpt)
    named = named_checkpoint(ckpt)
    start = start_of(config, named)
    trained = load_trained(ckpt, config.parallel, config.precision, ctx)
    objective = Finetuning(config.task.kind, ctx, trained.model.dtype)
    out = result_path(config, named)
    made: list[dict[str, Any]] = []
    beside = out.parent / "predictions"
    for name in splits(config):
        folder = None if config.predictions is None else Path(config.predictions)
        made.append(write_split(config, name, trained.model, objective, start, ctx, folder, beside))
    if not ctx.is_main:
        return
    result = {
        "task": config.task.name,
        "results": made,
        "task_settings": to_dict(config.task),
        "checkpoint": str(trained.path),
        "checkpoint_digest": trained.manifest.digest,
        "step": trained.manifest.step,
        "precision": config.precision.dtype,
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
    }
    with writing_to(str(out)):
        write_atomic(out, (json.dumps(result, indent=2) + "\n").encode())
    show(result, out)


def write_split(
    config: FinetuneConfig | EvalTaskConfig,
    name: str,
    model: PipelinedModel,
    objective: Finetuning,
    start: Start,
    ctx: ParallelContext,
    folder: Path | None,
    otherwise: Path | None = None,
) -> dict[str, Any]:
    """Score a split and write its predictions to `folder`; without one, those of a split without labels to
    `otherwise`. Returns what a receipt says of it. Collective over all ranks."""
    task = config.task
    split = read_split(task, name, path=config.data.path)
    size = config.batch_size if isinstance(config, EvalTaskConfig) else config.train.micro_batch_size
    evaluation = evaluation_of(task, split, start, dealing_of(size, start, ctx))
    with count_progress(f"scoring {name}", len(evaluation.examples), shown=ctx.is_main) as advance:
        metrics, predictions = evaluate(model, objective, task, evaluation, advance)
    folder = folder if folder is not None or split.has_labels else otherwise
    files: list[Path] = []
    if folder is not None and ctx.is_main:
        with writing_to(str(folder)):
            files = write_predictions(task, split, predictions, folder)
    return {
        **facts(task, split),
        "metrics": metrics,
        "truncated": evaluation.examples.truncated,
        "max_length": start.max_length,
        "predictions": [str(file) for file in files],
    }


def facts(task: TaskConfig, split: Split) -> dict[str, Any]:
    """What a receipt says of a split."""
    return {
        "split": split.name,
        "data": split.source,
        "rows": len(split),
        "digest": split.digest,
        "has_labels": split.has_labels,
    }


def show(result: dict[str, Any], out: Path) -> None:
    """The table for people."""
    title = f"eval {result['task']} · {plain(result['checkpoint'])} · step {result['step']}"
    made = table(title, "split", "rows#", "metric", "value#")
    for entry in result["results"]:
        for name, value in entry["metrics"].items():
            add_row(made, entry["split"], f"{entry['rows']:,}", name, f"{value:.4f}")
        if not entry["metrics"]:
            add_row(made, entry["split"], f"{entry['rows']:,}", "no labels: predicted only", "")
    screen = console()
    screen.print(made)
    for entry in result["results"]:
        for file in entry["predictions"]:
            screen.print(f"predictions of {entry['split']}: {plain(file)}")
    screen.print(f"written to {plain(out)}")
