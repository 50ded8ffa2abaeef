"""`mlm eval TASK`: score a finetuned checkpoint on a split of its task, or write its predictions."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.run_state import FINETUNING
from mlm.config.build import to_dict
from mlm.convert.source import Checkpoint, Source
from mlm.finetune.chat import Preferences
from mlm.finetune.config import REFERENCE_FREE, EvalTaskConfig
from mlm.finetune.inputs import StartModel, read_start, tokenize_split
from mlm.finetune.registry import check_installed, task_type
from mlm.finetune.results import BAD_ROWS, DATA_COLUMNS, DATA_PATH, resolve_best
from mlm.finetune.scoring import Scorer, one_label_warning, prediction_files
from mlm.finetune.splits import TaskSplit, held_out_part, read_split
from mlm.inference.trained import load_trained, open_for_layout, result_identity
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError, format_value
from mlm.util.ownership import claim_problems
from mlm.util.results import (
    folder_problem,
    is_stream,
    rename_earlier_result,
    result_problems,
    target_name,
    write_result,
)
from mlm.util.terminal import add_row, console, one_line, table


def preflight(config: EvalTaskConfig) -> list[str]:
    try:
        source = open_for_layout(config.ckpt, config.parallel)
        check_installed(config.task)
        start = read_start_model(config, source)
        if problems := task_problems(config, start):
            return problems
        for name in split_names(config):
            start.tokenize(config.task, read_task_split(config, name, start).select([0]))
    except UserError as error:
        return list(error.problems)
    out = result_path(config, start)
    if problem := folder_problem(out):
        return [problem]
    problems, task = result_problems(out), config.task
    if config.predictions is not None and task_type(task.kind).is_chat:
        problems.append(
            f"predictions={config.predictions}: conversations have none: leave it out, and use `mlm generate "
            "chat=true`"
        )
    elif config.predictions is not None:
        names = [file for name in split_names(config) for file in prediction_files(task, name)]
        problems += claim_problems(config.predictions, "predictions", key="predictions", writes=names)
    return problems


def read_start_model(config: EvalTaskConfig, source: Source | None = None) -> StartModel:
    """Read `ckpt` without its tensors; on the run's own rows, skip the rows that it skipped."""
    start = read_start(config, source)
    skipped = config.data.path is None and saved_state(start).get(BAD_ROWS) == "skip"
    return replace(start, skips=start.skips or skipped)


def saved_state(start: StartModel) -> dict[str, Any]:
    """Return the checkpoint's record of its finetuning; empty for a model of another program."""
    source = start.source
    saved = source.manifest.state.get(FINETUNING, {}) if isinstance(source, Checkpoint) else {}
    return saved if isinstance(saved, dict) else {}


def read_task_split(config: EvalTaskConfig, name: str, start: StartModel) -> TaskSplit:
    """Read a split of data.path, or of the rows that the checkpoint was finetuned on.

    From the run's single file of conversations only the held-out rows. Raises UserError.
    """
    task, data, saved = config.task, config.data, saved_state(start)
    if data.path is not None:
        return read_split(task, name, path=data.path, columns=data.columns, skips=start.skips)
    path, columns = saved.get(DATA_PATH), saved.get(DATA_COLUMNS)
    split = read_split(task, name, path=path, columns=columns, skips=start.skips)
    share = saved.get("depends_on", {}).get("task.held_out", task.held_out)
    return held_out_part(replace(task, held_out=float(share)), split, path)


def task_problems(config: EvalTaskConfig, start: StartModel) -> list[str]:
    task, model, kind = config.task, start.model, task_type(config.task.kind)
    saved = saved_state(start).get("depends_on", {})
    other = saved.get("task.name", task.name)
    if other != task.name:
        return [f"ckpt={config.ckpt} was finetuned on {other}, not on {task.name}: use `mlm eval {other}`"]
    remedy = f"finetune it first, with `mlm finetune {task.name} ckpt={config.ckpt}`"
    if not kind.is_chat and model.head not in ("classification", "span"):
        return [f"ckpt={config.ckpt} was not finetuned on a task: {remedy}"]
    if (model.head, model.num_labels) != (kind.head, kind.num_labels(task)):
        outputs = "spans" if model.head == "span" else f"{model.num_labels} outputs per text"
        return [
            f"ckpt={config.ckpt} has a head for {outputs}, which is not that of task {task.name}: {remedy}"
        ]
    if isinstance(kind, Preferences) and task.loss not in REFERENCE_FREE:
        return [
            f"task.loss={task.loss}: compares with the model before training; its scores are in result.json"
        ]
    settings = {**to_dict(task), "max_length": start.max_length}
    return [
        f"task.{key}={format_value(settings[key])}: ckpt={config.ckpt} was finetuned with "
        f"{format_value(value)}; use task.{key}={format_value(value)}"
        for key in ("kind", "labels", "max_length", "question_length", "doc_stride", "answers")
        if (value := saved.get(f"task.{key}", settings[key])) != settings[key]
    ]


def split_names(config: EvalTaskConfig) -> tuple[str, ...]:
    return config.task.validations if config.split is None else (config.split,)


def result_path(config: EvalTaskConfig, start: StartModel) -> Path:
    if config.out is not None:
        return Path(config.out)
    name = f"eval-{config.task.name}.json"
    if resolve_best(config.ckpt) != config.ckpt:
        return Path(config.ckpt, name)
    return start.source.result_file(name)


def run(config: EvalTaskConfig, ctx: ParallelContext) -> None:
    """Score the splits; rank 0 prints a table and writes a JSON receipt. Raises UserError."""
    begin, start, task = time.monotonic(), read_start_model(config), config.task
    trained = load_trained(start.source, config.parallel, config.precision, ctx)
    scorer = Scorer.of(trained.model, task, batch_size=config.batch_size, max_length=start.max_length)
    out = result_path(config, start)
    result_file = result_path(replace(config, out=None), start) if is_stream(out) else out
    scores = []
    for name in split_names(config):
        tokenized = tokenize_split(task, read_task_split(config, name, start), start)
        folder = None if tokenized.split.has_labels else result_file.parent / "predictions"
        if config.predictions is not None:
            folder = Path(config.predictions)
        scores.append(scorer.score_and_write(tokenized, folder))
    if not ctx.is_main:
        return
    results, standard_errors = [], task_type(task.kind).standard_errors
    for scored in scores:
        split, tokenized = scored.tokenized.split, scored.tokenized
        errors = standard_errors(task, split.rows, scored.predictions) if split.has_labels else {}
        results.append(
            {
                "split": split.name,
                "data": split.source,
                "rows": len(split),
                "digest": split.digest,
                "has_labels": split.has_labels,
                "metrics": scored.metrics,
                "standard_errors": errors,
                "truncated": tokenized.truncated,
                "notes": tokenized.notes(),
                "max_length": tokenized.max_length,
                "predictions": list(scored.files),
            }
        )
    result = {
        "task": task.name,
        "results": results,
        "task_settings": to_dict(task),
        **trained.facts("tokenizers", "scikit-learn", "scipy", "torchmetrics"),
        "finetuned_on": saved_state(start).get("depends_on", {}),
        "tokenizer_digest": start.tokenizer.digest,
        "vocabulary_digest": start.tokenizer.vocabulary_digest,
        "precision": config.precision.dtype,
        "config": to_dict(config),
        "seconds": round(time.monotonic() - begin, 3),
    }
    earlier = None if config.out is not None else rename_earlier_result(out, result, result_identity)
    write_result(out, result)
    show_table(result, out)
    for scored in scores:
        if warning := one_label_warning(task, scored.tokenized.split, scored.predictions):
            console().print(one_line(warning))
    if earlier is not None:
        console().print(f"the result there before: {one_line(earlier)}")


def show_table(result: dict[str, Any], out: Path) -> None:
    title = f"eval {result['task']} · {one_line(result['checkpoint'])} · step {result['step']}"
    grid = table(title, "split", "rows#", "metric", "value#", "stderr#")
    for entry in result["results"]:
        errors = {
            name: f"{error:.4f}" for name, error in entry["standard_errors"].items() if error is not None
        }
        rows = [(name, f"{x:.4f}", errors.get(name, "")) for name, x in entry["metrics"].items()]
        for row in rows or [("no labels: predicted only", "", "")]:
            add_row(grid, entry["split"], f"{entry['rows']:,}", *row)
    screen = console()
    screen.print(grid)
    for entry in result["results"]:
        for note in entry["notes"]:
            screen.print(one_line(note))
        for file in entry["predictions"]:
            screen.print(f"predictions of {entry['split']}: {one_line(file)}")
    screen.print(f"written to {one_line(target_name(out))}")
