"""What the scores of a run are a function of, but for rounding, and whether a directory is of that run."""

from pathlib import Path
from typing import Any

from mlm.checkpoint.native.folders import latest_checkpoint
from mlm.checkpoint.native.save_load import read_manifest
from mlm.config.build import show, to_dict
from mlm.config.tree import flatten
from mlm.finetune.best import STATE
from mlm.finetune.config import FinetuneConfig
from mlm.finetune.material import Splits, Start, weights_digest
from mlm.train.state import CHECKPOINTS

FIXED = ("seed", "dropout", "data.train_rows", "data.seed", "precision.dtype")
FIXED_SECTIONS = ("train.", "optimizer.", "schedule.", "task.")
FREE = (
    "train.micro_batch_size",
    *("task.hub", "task.hub_config", "task.tests", "task.submission", "task.submit_names", "task.id"),
    *("task.lr", "task.weight_decay", "task.epochs", "task.batch_size", "task.warmup"),  # defaults of others
)
"""What of those sections may change in a run directory."""
MAY_CHANGE = (
    *("name", "out", "seeds", "compile", "data.predict_tests"),
    *("tp", "pp", "vp", "dp", "sequence_parallel", "pipeline", "zero", "zero_reduce", "recompute"),
    *("precision.initial_loss_scale", "precision.min_loss_scale", "precision.loss_scale_window"),
)
MAY_CHANGE_SECTIONS = ("checkpoint.", "log.", "dist.")
"""Other keys that may change. Every key of FinetuneConfig is fixed, may change, or counts by content."""
WEIGHTS, VOCABULARY, ROWS = "ckpt", "data.tokenizer", "data.path"

Settings = dict[str, Any]


def depends_on(config: FinetuneConfig, start: Start, splits: Splits) -> Settings:
    """By key, the settings that may not change in a run directory, and digests of what is read.

    Of weights, tokenizer and rows the digests count: files may be moved. Raises UserError, OSError.
    """
    values = {
        key: value
        for key, value in flatten(to_dict(config)).items()
        if key in FIXED or (key.startswith(FIXED_SECTIONS) and key not in FREE)
    }
    digests = {f"{ROWS} {split.name}": split.digest for split in (splits.train, *splits.validations)}
    return {
        **values,
        "task.max_length": start.max_length,
        WEIGHTS: weights_digest(start.named),
        VOCABULARY: start.tokenizer.vocabulary_digest,
        **digests,
    }


def change_faults(config: FinetuneConfig, now: Settings) -> list[str]:
    """What keeps a run from going on with what its folder holds; nothing where that is no checkpoint.

    Raises UserError, CorruptFileError.
    """
    newest = latest_checkpoint(Path(config.out, CHECKPOINTS))
    if newest is None:
        return []
    state = read_manifest(newest).state.get(STATE)
    then = state.get("depends_on") if isinstance(state, dict) else None
    if not isinstance(then, dict):
        return [f"out={config.out}: holds checkpoints of another kind of run: set another out=…"]
    return [change(config, key, now.get(key), then[key]) for key in then if now.get(key) != then[key]]


def change(config: FinetuneConfig, key: str, now: Any, then: Any) -> str:
    """That a setting is another one than the run was begun with."""
    key, _, split = key.partition(" ")
    value, other, remedy = {
        WEIGHTS: (config.ckpt, "other weights", "name those"),
        VOCABULARY: (config.data.tokenizer, "another vocabulary", "name that tokenizer"),
        ROWS: (config.data.path, f"other rows of split {split}", "bring them back"),
    }.get(key, (now, show(then), f"use {key}={show(then)}"))
    return f"{key}={show(value)}: out={config.out} was begun with {other}: {remedy}, or set another out=…"
