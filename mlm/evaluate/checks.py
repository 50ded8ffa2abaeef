"""Checks of the settings of `mlm eval` and of lm-eval's model `mlm`."""

from dataclasses import asdict
from typing import Any

from mlm.data import files_present as present
from mlm.evaluate.config import EvalLossConfig, LmEvalConfig, ZeroShotConfig
from mlm.launch.checks import (
    checkpoint_exists,
    devices_exist,
    loss_scale_can_fall,
    problems_of,
    tokenizer_exists,
)
from mlm.parallel.layout_checks import RANK_RULES, READER_RULES, Launch
from mlm.util.errors import Problem


def check_eval_loss(
    config: EvalLossConfig, *, world_size: int | None, local_devices: int | None
) -> list[Problem]:
    """Problems of `mlm eval loss` that are visible without reading the checkpoint.

    sequence_parallel, pipeline, zero and recompute are accepted, so that the layout of the training can be
    given here too; they have no effect.
    """
    return problems_of(config, Launch(world_size, local_devices), RANK_RULES, EVAL_LOSS_RULES)


def check_zero_shot(
    config: ZeroShotConfig, *, world_size: int | None, local_devices: int | None
) -> list[Problem]:
    """Problems of `mlm eval wikitext103`, `lambada` and `all` that are visible without reading a file."""
    return problems_of(config, Launch(world_size, local_devices), READER_RULES, ZERO_SHOT_RULES)


def check_lm_eval(
    config: LmEvalConfig, *, world_size: int | None, local_devices: int | None
) -> list[Problem]:
    """Problems of lm-eval's model `mlm` that are visible without reading the checkpoint."""
    return problems_of(config, Launch(world_size, local_devices), READER_RULES, LM_EVAL_RULES)


def _corpus_exists(config: EvalLossConfig, _: Launch) -> Problem | None:
    return present.indexed("path", config.path)


def _files_exist(config: Any, _: Launch) -> Problem | None:
    named = ((f"data.{key}", path) for key, path in asdict(config.data).items())
    return next((problem for key, path in named if (problem := present.file(key, path))), None)


def _windows_overlap(config: Any, _: Launch) -> Problem | None:
    stride, length = getattr(config, "overlapping_eval", 1), config.seq_length
    if length is None or stride <= length:
        return None
    return Problem(
        ("overlapping_eval", "seq_length"),
        f"overlapping_eval={stride} is more than seq_length={length}, so tokens between windows would not be "
        "scored",
        f"use overlapping_eval={length} or less",
    )


EVAL_LOSS_RULES = (devices_exist, loss_scale_can_fall, checkpoint_exists, _corpus_exists, tokenizer_exists)
LM_EVAL_RULES = (devices_exist, checkpoint_exists, tokenizer_exists)
ZERO_SHOT_RULES = (
    devices_exist,
    loss_scale_can_fall,
    _windows_overlap,
    checkpoint_exists,
    tokenizer_exists,
    _files_exist,
)
