"""Checks of the settings of `mlm eval` and of lm-eval's model `mlm`."""

from dataclasses import asdict
from typing import Any

from mlm.data import files_present as present
from mlm.evaluate.config import EvalLossConfig, LmEvalConfig, ZeroShotConfig
from mlm.launch.checks import (
    Rule,
    devices_are_there,
    errors_of,
    loss_scale_can_fall,
)
from mlm.parallel.layout_checks import RANK_RULES, Launch


def check_eval_loss(
    config: EvalLossConfig, *, world_size: int | None, local_devices: int | None
) -> list[str]:
    """Faults of `mlm eval loss` that show without reading the checkpoint.

    sequence_parallel, pipeline, zero and recompute say how training saves memory and time. A layout that was
    trained with may name them here too; they have no effect.
    """
    return errors_of(config, Launch(world_size, local_devices), RANK_RULES, EVAL_LOSS_RULES)


def check_zero_shot(
    config: ZeroShotConfig, *, world_size: int | None, local_devices: int | None
) -> list[str]:
    """Faults of `mlm eval wikitext103`, `lambada` and `all` that show without reading a file."""
    return errors_of(config, Launch(world_size, local_devices), RANK_RULES, ZERO_SHOT_RULES)


def check_lm_eval(config: LmEvalConfig, *, world_size: int | None, local_devices: int | None) -> list[str]:
    """Faults of lm-eval's model `mlm` that show without reading the checkpoint."""
    return errors_of(config, Launch(world_size, local_devices), RANK_RULES, LM_EVAL_RULES)


def _windows_overlap(config: Any, _: Launch) -> str | None:
    stride, length = getattr(config, "overlapping_eval", 1), config.seq_length
    if length is None or stride <= length:
        return None
    return (
        f"overlapping_eval={stride} is more than seq_length={length}, so tokens between windows would not be "
        f"scored; use overlapping_eval={length} or less"
    )


def _texts_are_there(config: Any, _: Launch) -> str | None:
    named = ((f"data.{key}", path) for key, path in asdict(config.data).items())
    return next((fault for key, path in named if (fault := present.file(key, path))), None)


EVAL_LOSS_RULES: list[tuple[str, Rule]] = [
    ("", devices_are_there),
    ("precision.min_loss_scale precision.initial_loss_scale", loss_scale_can_fall),
    ("", lambda config, _: present.model(config.ckpt)),
    ("", lambda config, _: present.indexed("path", config.path)),
    ("", lambda config, _: present.tokenizer("tokenizer", config.tokenizer)),
]


LM_EVAL_RULES: list[tuple[str, Rule]] = [
    ("", devices_are_there),
    ("", lambda config, _: present.model(config.ckpt)),
    ("", lambda config, _: present.tokenizer("tokenizer", config.tokenizer)),
]


ZERO_SHOT_RULES: list[tuple[str, Rule]] = [
    ("", devices_are_there),
    ("precision.min_loss_scale precision.initial_loss_scale", loss_scale_can_fall),
    ("overlapping_eval seq_length", _windows_overlap),
    ("", lambda config, _: present.model(config.ckpt)),
    ("", lambda config, _: present.tokenizer("tokenizer", config.tokenizer)),
    ("", _texts_are_there),
]
