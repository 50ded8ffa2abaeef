"""What finetuning and its evaluation are made of: the model that `ckpt` names, its tokenizer, and rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlm.checkpoint.native.format import canonical
from mlm.checkpoint.native.save_load import load_checkpoint, read_manifest
from mlm.data.tokenizer import Tokenizer
from mlm.errors import UserError
from mlm.files.atomic import digest_bytes
from mlm.finetune.batches import chosen_rows
from mlm.finetune.best import best_of
from mlm.finetune.config import EvalTaskConfig, FinetuneConfig
from mlm.finetune.examples import Examples, make_examples
from mlm.finetune.kinds import KINDS
from mlm.finetune.rows import Split, read_split
from mlm.finetune.task_config import TaskConfig
from mlm.inference.hf_source import load_model_folder, open_tensors
from mlm.inference.trained import Named, is_model_folder, load_tokenizer, named_checkpoint, vocabulary_fault
from mlm.models.config import ModelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import ParameterShard
from mlm.train.state import model_shards

BEHIND = ("model.mlm_head.", "model.sop_head.", "model.classifier.", "model.pooler.")
"""What a checkpoint may hold that the model with its new head does not have, or not from there."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where finetuning begins."""

    named: Named
    model: ModelConfig
    """The checkpoint's, with the head that the task needs."""
    tokenizer: Tokenizer
    max_length: int
    """Tokens of a text at the most: task.max_length, or what the model reads."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The rows of a run."""

    train: Split
    validations: Sequence[Split]
    """One per split of task.validations."""
    tests: Sequence[Split] = ()
    """Those of task.tests where data.predict_tests is set."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A split and what is made of it."""

    split: Split
    examples: Examples


def start_of(config: FinetuneConfig | EvalTaskConfig) -> Start:
    """Read what `ckpt` names, without a tensor: of a finetuning run directory the best. Raises UserError."""
    task, named = config.task, named_checkpoint(best_of(config.ckpt))
    kind, model = KINDS[task.kind], named.config.model
    if isinstance(config, FinetuneConfig):
        model = replace(model, head=kind.head, num_labels=kind.num_labels(task))
        if config.dropout is not None:
            model = replace(model, hidden_dropout=config.dropout, attention_dropout=config.dropout)
    return Start(
        named=named,
        model=model,
        tokenizer=tokenizer_of(config, named),
        max_length=min(task.max_length, model.max_positions),
    )


def tokenizer_of(config: FinetuneConfig | EvalTaskConfig, named: Named) -> Tokenizer:
    """The tokenizer that the model knows. Raises UserError."""
    given, key = config.data.tokenizer, "data.tokenizer"
    tokenizer = load_tokenizer(given, named.path, key, force=True)  # compared below
    if fault := vocabulary_fault(given, tokenizer, named.config.model, key):
        raise UserError(fault)
    if given is None:
        return tokenizer
    try:
        saved = load_tokenizer(None, named.path)
    except UserError:
        return tokenizer
    if saved.vocabulary_digest != tokenizer.vocabulary_digest:
        raise UserError(
            f"{key}={given} has another vocabulary than the one saved with ckpt={config.ckpt}: leave {key} "
            "out"
        )
    return tokenizer


def splits_of(config: FinetuneConfig) -> Splits:
    """The rows to train on, to validate on and to predict. Raises UserError for rows that cannot be used."""
    task, path = config.task, config.data.path
    train = read_split(task, task.train, path=path)
    if config.data.train_rows is not None and config.data.train_rows > len(train):
        raise UserError(
            f"data.train_rows={config.data.train_rows} is more than the {len(train)} rows of {train.source}, "
            f"split {train.name}; use data.train_rows={len(train)} or less, or null for all"
        )
    return Splits(
        train=train,
        validations=[read_split(task, name, path=path) for name in task.validations],
        tests=[read_split(task, name, path=path) for name in task.tests] if config.data.predict_tests else (),
    )


def rows_trained_on(config: FinetuneConfig, split: Split) -> Split:
    """The split, or data.train_rows of it."""
    if config.data.train_rows is None:
        return split
    chosen = chosen_rows(len(split), config.data.train_rows, config.data.seed).tolist()
    rows, places = ([of[n] for n in chosen] for of in (split.rows, split.places))
    return replace(split, rows=rows, places=places)


def evaluation_of(task: TaskConfig, split: Split, start: Start) -> Evaluation:
    """A split as it is scored, or trained on. Raises UserError."""
    kind, length = start.model.kind, start.max_length
    examples = make_examples(task, split, start.tokenizer, kind=kind, max_length=length)
    return Evaluation(split=split, examples=examples)


def check_texts(task: TaskConfig, split: Split, start: Start) -> None:
    """Whether tokenizer and max_length can make examples at all. Raises UserError."""
    evaluation_of(task, replace(split, rows=split.rows[:1], places=split.places[:1]), start)


def weights_digest(named: Named) -> str:
    """Digest of the weights that `ckpt` names, wherever they lie. Raises UserError, OSError."""
    if not is_model_folder(named.path):
        return read_manifest(named.path).digest
    files: dict[str, Any] = open_tensors(named.path).digests(lambda _: None)
    return digest_bytes(canonical(files))


def load_body(shards: Sequence[ParameterShard], named: Named, ctx: ParallelContext) -> None:
    """Fill a model from what `ckpt` names, but for its new head. Collective over all ranks.

    A pooler that the checkpoint lacks begins anew too. Raises UserError, CorruptFileError.
    """
    body = [shard for shard in shards if not shard.name.startswith("classifier.")]
    if is_model_folder(named.path):
        load_model_folder(body, named.path, ctx, fill=False)
        return
    there = read_manifest(named.path).tensors
    load_checkpoint(
        named.path,
        model_shards([s for s in body if f"model.{s.name}" in there or not s.name.startswith("pooler.")]),
        rank=ctx.rank,
        world_size=ctx.world_size,
        group=ctx.host_group,
        watch=ctx.watch,
        allow_extra=lambda name: name.startswith(("optimizer.", *BEHIND)),
        cast=True,
    )
