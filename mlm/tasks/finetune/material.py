"""What finetuning and its evaluation are made of: the model that `ckpt` names, its tokenizer, and rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlm.checkpoint.format import Manifest
from mlm.checkpoint.save_load import load_checkpoint, read_manifest
from mlm.config.downstream_schema import TaskConfig
from mlm.config.errors import UserError
from mlm.config.finetune_schema import EvalTaskConfig, FinetuneConfig
from mlm.config.model_schema import ModelConfig
from mlm.data.tokenizer import Tokenizer
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import ParameterShard
from mlm.tasks.finetune.batches import Dealing, chosen_rows
from mlm.tasks.finetune.examples import Example, Examples, make_examples
from mlm.tasks.finetune.kinds import KINDS
from mlm.tasks.finetune.outputs import Evaluation
from mlm.tasks.finetune.rows import Split, read_split
from mlm.tasks.hf_source import load_model_folder
from mlm.tasks.trained import Named, is_model_folder, load_tokenizer, vocabulary_fault
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


def start_of(config: FinetuneConfig | EvalTaskConfig, named: Named) -> Start:
    """Read what `ckpt` names, without a tensor. Raises UserError."""
    task, model = config.task, named.config.model
    kind = KINDS[task.kind]
    if isinstance(config, FinetuneConfig):
        model = replace(model, head=kind.head, num_labels=kind.num_labels(task))
        if config.dropout is not None:
            model = replace(model, hidden_dropout=config.dropout, attention_dropout=config.dropout)
    tokenizer = load_tokenizer(config.data.tokenizer, named.path)
    if fault := vocabulary_fault(config.data.tokenizer, tokenizer, model):
        raise UserError(fault)
    return Start(
        named=named, model=model, tokenizer=tokenizer, max_length=min(task.max_length, model.max_positions)
    )


def splits_of(config: FinetuneConfig) -> tuple[Split, list[Split]]:
    """The split to train on and those to validate on. Raises UserError for rows that cannot be used."""
    task, path = config.task, config.data.path
    train = read_split(task, task.train, path=path)
    if config.data.train_rows is not None and config.data.train_rows > len(train):
        raise UserError(
            f"data.train_rows={config.data.train_rows} is more than the {len(train)} rows of {train.source}, "
            f"split {train.name}; use data.train_rows={len(train)} or less, or null for all"
        )
    return train, [read_split(task, name, path=path) for name in task.validations]


def training_examples(
    config: FinetuneConfig, split: Split, start: Start
) -> tuple[Examples, Sequence[Example]]:
    """All examples of the training split, and those of the rows to train on."""
    made = make_examples(
        config.task, split, start.tokenizer, kind=start.model.kind, max_length=start.max_length
    )
    if config.data.train_rows is None:
        return made, made
    rows = set(chosen_rows(len(split), config.data.train_rows, config.data.seed).tolist())
    return made, [example for example in made if example.row in rows]


def evaluation_of(task: TaskConfig, split: Split, start: Start, dealing: Dealing) -> Evaluation:
    """A split as it is scored."""
    examples = make_examples(task, split, start.tokenizer, kind=start.model.kind, max_length=start.max_length)
    return Evaluation(split=split, examples=examples, dealing=dealing)


def dealing_of(
    micro_batch_size: int, start: Start, ctx: ParallelContext, *, sequence_parallel: bool = False
) -> Dealing:
    """How batches are cut for this rank."""
    return Dealing(
        budget=micro_batch_size * start.max_length,
        rank=ctx.dp.rank,
        size=ctx.dp.size,
        groups_of=ctx.pp.size,
        multiple=ctx.tp.size if sequence_parallel else 1,
    )


def load_body(shards: Sequence[ParameterShard], named: Named, ctx: ParallelContext) -> Manifest:
    """Fill a model from what `ckpt` names, but for its new head. Collective over all ranks.

    A pooler that the checkpoint lacks begins anew too. Raises UserError, CorruptFileError.
    """
    if is_model_folder(named.path):
        old = [shard for shard in shards if not shard.name.startswith("classifier.")]
        return load_model_folder(old, named.path, ctx, fill=False)
    there = read_manifest(named.path).tensors
    old = [
        shard
        for shard in shards
        if not shard.name.startswith("classifier.")
        and (f"model.{shard.name}" in there or not shard.name.startswith("pooler."))
    ]
    return load_checkpoint(
        named.path,
        model_shards(old),
        rank=ctx.rank,
        world_size=ctx.world_size,
        group=ctx.host_group,
        watch=ctx.watch,
        allow_extra=lambda name: name.startswith(("optimizer.", *BEHIND)),
        cast=True,
    )


def tokenizer_beside(tokenizer: Tokenizer, folder: Path) -> None:
    """Save the tokenizer where commands look for it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer.json")
