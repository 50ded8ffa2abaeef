"""Checks of the settings of `mlm finetune` and `mlm eval TASK`."""

from mlm.data import files_present as present
from mlm.finetune.config import EvalTaskConfig, FinetuneConfig
from mlm.finetune.task_checks import check_task
from mlm.launch.checks import (
    Rule,
    devices_are_there,
    errors_of,
    loss_scale_can_fall,
    lr_falls,
)
from mlm.parallel.layout_checks import FINETUNE_LAYOUT_RULES, RANK_RULES, Launch


def check_finetune(config: FinetuneConfig, *, world_size: int | None, local_devices: int | None) -> list[str]:
    """Faults of `mlm finetune` that show without reading the checkpoint or the rows."""
    faults = errors_of(config, Launch(world_size, local_devices), FINETUNE_LAYOUT_RULES, FINETUNE_RULES)
    return [*faults, *check_task(config.task)]


def check_eval_task(
    config: EvalTaskConfig, *, world_size: int | None, local_devices: int | None
) -> list[str]:
    """Faults of `mlm eval TASK` that show without reading the checkpoint or the rows."""
    faults = errors_of(config, Launch(world_size, local_devices), RANK_RULES, EVAL_TASK_RULES)
    return [*faults, *check_task(config.task)]


def _tests_are_named(config: FinetuneConfig, _: Launch) -> str | None:
    if not config.data.predict_tests or config.task.tests:
        return None
    return f"data.predict_tests=true: task {config.task.name} has no task.tests; use data.predict_tests=false"


FINETUNE_RULES: list[tuple[str, Rule]] = [
    ("", devices_are_there),
    ("", _tests_are_named),
    ("schedule.min_lr optimizer.lr", lr_falls),
    ("precision.min_loss_scale precision.initial_loss_scale", loss_scale_can_fall),
    ("", lambda config, _: present.folder("data.path", config.data.path)),
    ("", lambda config, _: present.tokenizer("data.tokenizer", config.data.tokenizer)),
]


EVAL_TASK_RULES = [rule for rule in FINETUNE_RULES if rule[1] not in (_tests_are_named, lr_falls)]
