"""Inputs of finetuning and its evaluation: the model of `ckpt`, its tokenizer and rows, and their identity.

A run's scores are a function of `depends_on`, except for rounding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.folders import CHECKPOINTS, latest_checkpoint
from mlm.checkpoint.native.run_state import FINETUNING
from mlm.checkpoint.native.save_load import Manifest, read_manifest
from mlm.checkpoint.parameters import parameters
from mlm.config.build import to_dict
from mlm.config.tree import flatten
from mlm.convert.huggingface.mapping import Note
from mlm.convert.source import Source, open_source
from mlm.convert.weights import fill_parameters
from mlm.data.tokenizer import Tokenizer
from mlm.finetune.config import EvalTaskConfig, FinetuneConfig, TaskConfig
from mlm.finetune.registry import task_type
from mlm.finetune.splits import RowProblems, TaskSplit, TokenizedSplit, held_out_part, read_split, tokenize
from mlm.inference.trained import prediction_problem
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import ParameterShard
from mlm.util.errors import ConfigError, UserError, attempt, format_value


@dataclass(frozen=True, kw_only=True)
class StartModel:
    """The model that finetuning begins with."""

    source: Source
    model: ModelConfig
    """The checkpoint's, with the head of the task."""
    tokenizer: Tokenizer
    max_length: int
    """Maximum tokens of a text: task.max_length, or model.max_positions if that is less."""
    skips: bool = False
    """True if rows that cannot be read or rendered are left out."""

    @property
    def notes(self) -> list[Note]:
        modules = {name.partition(".")[0] for name in parameters(self.model)}
        return [note for note in self.source.notes if not note.about or note.about in modules]

    def tokenize(self, task: TaskConfig, split: TaskSplit) -> TokenizedSplit:
        causal = family_of(self.model.kind).causal
        return tokenize(
            task, split, self.tokenizer, causal=causal, max_length=self.max_length, skips=self.skips
        )


def read_start(config: FinetuneConfig | EvalTaskConfig, source: Source | None = None) -> StartModel:
    """Read `ckpt` without its tensors; of a finetuning run the best checkpoint. Raises UserError.

    `source` is `ckpt` if it is already open.
    """
    task, source = config.task, source or open_source(config.ckpt)
    kind, model = task_type(task.kind), source.model
    if kind.is_chat and (problem := prediction_problem(config.ckpt, model, causal=True)):
        raise UserError(problem)
    if isinstance(config, FinetuneConfig):
        model = replace(model, head=kind.head, num_labels=kind.num_labels(task))
        if config.dropout is not None:
            model = replace(model, hidden_dropout=config.dropout, attention_dropout=config.dropout)
    file = config.data.tokenizer
    tokenizer = source.load_tokenizer(file, "data.tokenizer")
    if kind.is_chat:
        template, key = config.data.chat_template, "data.chat_template"
        if template or kind.needs_template or source.template_problem(file, key=key) is None:
            tokenizer.chat_template = source.load_chat_template(template, file, tokenizer, key=key)
    return StartModel(
        source=source,
        model=model,
        tokenizer=tokenizer,
        max_length=min(task.max_length, model.max_positions),
        skips=config.data.bad_rows == "skip",
    )


def read_splits(config: FinetuneConfig, start: StartModel | None = None) -> dict[str, TaskSplit]:
    """Read the rows to train on, to validate on and to predict, by the split's name.

    With `start` the first rows of each are rendered too. Raises ConfigError for all unusable rows.
    """
    task, data, problems = config.task, config.data, list[str]()
    names = (task.train, *task.validations, *(task.tests if data.predict_tests else ()))
    skips = data.bad_rows == "skip"

    # the first rows are rendered before ranks start, so that their problems are listed with all others
    def check(split: TaskSplit) -> RowProblems:
        part = split.select(range(min(1000, len(split))))
        return replace(start, skips=True).tokenize(task, part).problems if start and part.rows else ()

    def read(name: str) -> None:
        split = read_split(task, name, path=data.path, columns=data.columns, skips=skips, check=check)
        splits[name] = held_out_part(task, split, data.path)

    splits = dict[str, TaskSplit]()
    for name in names:
        attempt(problems, partial(read, name))
    if problems:
        raise ConfigError(problems)
    return splits


SMALLEST_BATCH = 4


def choose_epochs_and_batch(config: FinetuneConfig, splits: Mapping[str, TaskSplit]) -> FinetuneConfig:
    """Set the batch size and the epochs that `train` leaves null, by the number of rows to train on.

    They are the task's if these make task.min_steps; else the batch is halved, then epochs are added.
    """
    task, rows = config.task, len(splits[config.task.train])
    epochs, batch = config.train.epochs or task.epochs, config.train.global_batch_size or task.batch_size
    if config.train.global_batch_size is None:
        while batch > SMALLEST_BATCH and epochs * math.ceil(rows / batch) < task.min_steps:
            batch = max(batch // 2, SMALLEST_BATCH)
    if config.train.epochs is None:
        epochs = max(epochs, math.ceil(task.min_steps / math.ceil(rows / batch)))
    return replace(config, train=replace(config.train, epochs=epochs, global_batch_size=batch))


def tokenize_split(task: TaskConfig, split: TaskSplit, start: StartModel) -> TokenizedSplit:
    """Return a split with its examples. Raises UserError, also if there are none."""
    tokenized = start.tokenize(task, split)
    if not tokenized.examples and not tokenized.truncated and tokenized.problems:
        raise UserError(
            f"data.bad_rows=skip: no row of {split.name} is left of {len(split):,}, the first of them "
            f"{tokenized.problems[0][0]}: {tokenized.problems[0][1]}"
        )
    if not tokenized.examples:
        raise UserError(
            f"{split.source}: of the {len(split):,} rows of {split.name} none has a token to learn among its "
            f"first {start.max_length}: raise task.max_length, as far as the model reads"
        )
    return tokenized


def load_body(shards: Sequence[ParameterShard], source: Source, ctx: ParallelContext) -> Manifest:
    """Load all weights except the new head and adapters from `ckpt`. Collective over all ranks.

    A pooler that the checkpoint lacks stays new. Raises UserError, CorruptFileError.
    """
    body = [s for s in shards if not s.name.startswith("classifier.") and ".lora." not in s.name]
    return fill_parameters(body, source, ctx, initialize=False)


FIXED = ("seed", "dropout", "precision.dtype")
FIXED_SECTIONS = ("train.", "optimizer.", "schedule.", "task.", "lora.")
FREE = (
    "train.micro_batch_size",
    *("task.hub", "task.hub_config", "task.tests", "task.submission", "task.submit_names", "task.id"),
    *("task.lr", "task.weight_decay", "task.epochs", "task.batch_size", "task.min_steps", "task.warmup"),
    *("data.columns", "data.bad_rows"),  # rows count by content
)
"""Keys that may change in a run directory."""

Settings = dict[str, Any]


def fixed_settings(config: FinetuneConfig, start: StartModel, splits: Mapping[str, TaskSplit]) -> Settings:
    """Return by key the settings that may not change in a run directory.

    Weights, tokenizer and rows are compared by digest: files may be moved. Raises UserError, OSError.
    """
    values = {
        key: value
        for key, value in flatten(to_dict(config)).items()
        if key in FIXED or (key.startswith(FIXED_SECTIONS) and key not in FREE)
    }
    template, task = start.tokenizer.chat_template, config.task
    return {
        **values,
        "task.max_length": start.max_length,
        "ckpt": start.source.digest,
        "data.tokenizer": start.tokenizer.vocabulary_digest,
        **({} if template is None else {"data.chat_template": template.digest}),
        **{f"data.path {name}": splits[name].digest for name in (task.train, *task.validations)},
    }


def change_problems(config: FinetuneConfig, settings: Settings) -> list[str]:
    """Return changed settings that prevent resuming; none without a checkpoint.

    Raises UserError, CorruptFileError.
    """
    newest = latest_checkpoint(Path(config.out, CHECKPOINTS))
    if newest is None:
        return []
    state = read_manifest(newest).state.get(FINETUNING)
    saved = state.get("depends_on") if isinstance(state, dict) else None
    if not isinstance(saved, dict):
        return [f"out={config.out}: holds checkpoints of another type of run: set another out=…"]
    problems = []
    for name in (name for name in saved if settings.get(name) != saved[name]):
        key, _, split = name.partition(" ")
        saved_value = format_value(saved[name])
        value, difference, remedy = {
            "ckpt": (config.ckpt, "other weights", "name those"),
            "data.tokenizer": (config.data.tokenizer, "another vocabulary", "name that tokenizer"),
            "data.chat_template": (config.data.chat_template, "another chat template", "name that"),
            "data.path": (config.data.path, f"other rows of split {split}", "bring them back"),
        }.get(key, (settings.get(name), saved_value, f"use {key}={saved_value}"))
        problem = f"out={config.out} was begun with {difference}: {remedy}, or set another out=…"
        problems.append(f"{key}={format_value(value)}: {problem}")
    return problems
