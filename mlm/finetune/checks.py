"""Checks of the settings of `mlm finetune` and `mlm eval TASK`."""

from pathlib import Path
from typing import Any

from mlm.data import files_present as present
from mlm.finetune.config import EvalTaskConfig, FinetuneConfig
from mlm.finetune.task_checks import check_task
from mlm.launch.checks import devices_exist, loss_scale_can_fall, lr_falls, problems_of, stages_exist
from mlm.parallel.layout_checks import FINETUNE_LAYOUT_RULES, READER_RULES, Launch
from mlm.training.checks import optimizer_fits_layout, optimizer_works
from mlm.util.errors import Absent, Problem, UserError


def check_finetune(
    config: FinetuneConfig, *, world_size: int | None, local_devices: int | None
) -> list[Problem]:
    """Problems of `mlm finetune` that are visible without reading the checkpoint or the rows."""
    launch = Launch(world_size, local_devices)
    return [
        *problems_of(config, launch, FINETUNE_LAYOUT_RULES, FINETUNE_RULES),
        *check_task(config.task),
    ]


def check_eval_task(
    config: EvalTaskConfig, *, world_size: int | None, local_devices: int | None
) -> list[Problem]:
    """Problems of `mlm eval TASK` that are visible without reading the checkpoint or the rows."""
    launch = Launch(world_size, local_devices)
    return [*problems_of(config, launch, READER_RULES, EVAL_TASK_RULES), *check_task(config.task)]


def _tests_are_named(config: FinetuneConfig, _: Launch) -> Problem | None:
    if not config.data.predict_tests or config.task.tests:
        return None
    return Problem(
        ("data.predict_tests", "task.tests"),
        f"data.predict_tests=true: task {config.task.name} has no task.tests",
        "use data.predict_tests=false",
    )


def _rows_exist(config: Any, _: Launch) -> Problem | None:
    if isinstance(config, FinetuneConfig) and config.data.path is None and config.task.hub is None:
        why = f"task {config.task.name} has no data set on the Hub"
        return Absent.at("data.path", None, why, "give data.path=… or task.hub=…")
    return present.folder("data.path", config.data.path)


def _tokenizer_exists(config: Any, _: Launch) -> Problem | None:
    return present.tokenizer("data.tokenizer", config.data.tokenizer)


def _model_exists(config: Any, _: Launch) -> Problem | None:
    return present.model(config.ckpt)


def _chat_template_exists(config: Any, _: Launch) -> Problem | None:
    key, given = "data.chat_template", config.data.chat_template
    if given is not None or config.task.kind != "chat":
        return present.chat_template(key, given)
    from mlm.inference.chat import template_problem  # imports torch, which `mlm --help` does without

    try:
        return template_problem(config.data.tokenizer, Path(config.ckpt), key=key)
    except (UserError, OSError):
        return None  # reported where they are read


def _incidents_are_followed(config: FinetuneConfig, _: Launch) -> Problem | None:
    if config.incident.action != "rewind":
        return None
    why = "finetuning reads every row once an epoch, and leaves none out"
    return Problem.at("incident.action", "rewind", why, "use incident.action=skip, log or stop")


EVAL_TASK_RULES = (
    devices_exist,
    loss_scale_can_fall,
    _model_exists,
    _rows_exist,
    _tokenizer_exists,
    _chat_template_exists,
)
FINETUNE_RULES = (
    stages_exist,
    optimizer_works,
    optimizer_fits_layout,
    _tests_are_named,
    _incidents_are_followed,
    lr_falls,
    *EVAL_TASK_RULES,
)
