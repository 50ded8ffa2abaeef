"""Predictions for texts in Python, by the task that a model was finetuned on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlm.checkpoint.native.format import RESTORE
from mlm.checkpoint.native.run_state import FINETUNING
from mlm.checkpoint.native.run_state import as_strings as strings
from mlm.config.build import from_dict
from mlm.convert.huggingface.mapping import label_entries
from mlm.convert.source import ModelFolder
from mlm.data.tokenizer import Tokenizer
from mlm.finetune.config import TaskConfig
from mlm.finetune.registry import task_type
from mlm.finetune.rows import RowError, TaskRow
from mlm.finetune.scoring import Scorer
from mlm.finetune.splits import TaskSplit, tokenize
from mlm.inference.trained import LoadedModel
from mlm.models.family import family_of
from mlm.util.errors import ConfigError, CorruptFileError, UserError, type_of


def predict(trained: LoadedModel, tokenizer: Tokenizer, rows: Sequence[Any], *, batch_size: int) -> list[Any]:
    """Return the model's answer to each row, the same on every rank. Collective over all ranks.

    A row is a text, a tuple of texts in the order of the task's columns, or a mapping by column. An answer
    is {"label": …, "probabilities": …} if the task has labels, else a number or a text. Raises UserError.
    """
    model = trained.config.model
    if model.head not in ("classification", "span"):
        problem, fix = "was not finetuned on a task", "finetune it first, or use logits(tokens)"
        if FINETUNING in trained.manifest.state:
            problem, fix = "was finetuned to answer messages", "use chat(messages)"
        raise UserError(f"{trained.path}: {problem}; {fix}")
    if not rows:
        return []
    task = read_task(trained, is_pair=any(isinstance(row, tuple) and len(row) == 2 for row in rows))
    length = min(task.max_length, model.max_positions)
    causal, split = family_of(model.kind).causal, make_split(task, rows)
    tokenized = tokenize(task, split, tokenizer, causal=causal, max_length=length)
    scorer = Scorer.of(trained.model, task, batch_size=batch_size, max_length=length)
    predictions = scorer.predict(tokenized)
    if not task_type(task.kind).gives_probabilities:
        return [prediction.value for prediction in predictions]
    answers = []
    for prediction in predictions:
        scores = np.array(prediction.scores, dtype=np.float64)
        weights = np.exp(scores - scores.max())
        probabilities = dict(zip(task.labels, (weights / weights.sum()).tolist(), strict=True))
        answers.append({"label": task.labels[int(prediction.value)], "probabilities": probabilities})
    return answers


def read_task(trained: LoadedModel, *, is_pair: bool) -> TaskConfig:
    """Return the task that the checkpoint was finetuned on, or one for a classifier of another program.

    Raises UserError, and CorruptFileError for a record that does not suit the model.
    """
    state, model = trained.manifest.state.get(FINETUNING), trained.config.model
    saved = state.get("depends_on") if isinstance(state, dict) else None
    if not isinstance(saved, dict):
        return _foreign_task(trained, is_pair=is_pair)
    settings = {key.removeprefix("task."): saved[key] for key in saved if key.startswith("task.")}
    try:
        task = from_dict(TaskConfig, settings)
    except ConfigError as error:
        reason = error.problems[0]
        raise CorruptFileError(f"{trained.path}: its task cannot be read ({reason}). {RESTORE}") from error
    kind = task_type(task.kind)
    if (kind.head, kind.num_labels(task)) != (model.head, model.num_labels):
        raise CorruptFileError(f"{trained.path}: its head does not fit its task {task.name}. {RESTORE}")
    return replace(task, allow_empty=True)


def _foreign_task(trained: LoadedModel, *, is_pair: bool) -> TaskConfig:
    """Return a task for a classifier of `transformers`, with its names of labels."""
    model, path = trained.config.model, trained.path
    if model.head == "span" or model.num_labels < 2:
        raise UserError(
            f"{path}: its task is not recorded, and its head is not a classifier of two labels or more; use "
            "`mlm eval TASK`, which names the task"
        )
    if isinstance(trained.source, ModelFolder):
        names = trained.source.hf.token_ids.labels
    else:
        source = trained.manifest.state.get("source")
        names = strings(source.get("labels")) if isinstance(source, dict) else ()
    labels = tuple(label_entries(model, names)["label2id"])
    return TaskConfig(
        name=path.name,
        columns=("text", "pair") if is_pair else ("text",),
        labels=labels,
        allow_empty=True,
        max_length=model.max_positions,
    )


def make_split(task: TaskConfig, rows: Sequence[Any]) -> TaskSplit:
    """Return the rows as a split without labels. Raises UserError for one that the task cannot read."""
    kind, parsed = task_type(task.kind), list[TaskRow]()
    for number, row in enumerate(rows):
        values = (row,) if isinstance(row, str) else row
        if isinstance(row, Mapping):
            record = {key: value for key, value in row.items() if key != task.label}
        elif not isinstance(values, tuple):
            raise TypeError(
                f"texts[{number}]: {type_of(row)}; give a text, a tuple of texts, or a dict by column"
            )
        elif len(values) != len(task.columns):
            raise UserError(
                f"texts[{number}]: {len(values)} of the task's columns; give a tuple or a dict of "
                f"{', '.join(task.columns)}"
            )
        else:
            record = dict(zip(task.columns, values, strict=True))
        try:
            parsed.append(kind.parse(task, record, str(number)))
        except RowError as error:
            raise UserError(f"texts[{number}]: {error}") from error
    return TaskSplit(
        name="texts",
        source="texts",
        rows=parsed,
        locations=[f"texts[{number}]" for number in range(len(parsed))],
        digest="",
        has_labels=False,
    )
