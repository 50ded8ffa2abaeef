"""Checks of the settings of `mlm finetune` and `mlm eval TASK`, and of the task."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm.config.suggest import nearest
from mlm.data import files_present as present
from mlm.data.chat_builtin import TURNS
from mlm.finetune.config import EvalTaskConfig, FinetuneConfig, TaskConfig
from mlm.launch.rules.checks import (
    checkpoint_exists,
    devices_exist,
    loss_scale_can_fall,
    lr_falls,
    problems_of,
)
from mlm.launch.rules.layout import FINETUNE_LAYOUT_RULES, READER_RULES, Launch
from mlm.runs.checks import optimizer_fits_layout, optimizer_works
from mlm.util.errors import Absent, Problem, UserError, show

if TYPE_CHECKING:
    from mlm.finetune.task_type import TaskType


HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILE_NAME = re.compile(r"[\w-][\w.-]*")


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


def _rows_exist(config: Any, _: Launch) -> Problem | None:
    if isinstance(config, FinetuneConfig) and config.data.path is None and config.task.hub is None:
        why = f"task {config.task.name} has no data set on the Hub"
        return Absent.at("data.path", None, why, "give data.path=… or task.hub=…")
    return present.folder("data.path", config.data.path)


def _chat_template_exists(config: Any, _: Launch) -> Problem | None:
    key, given = "data.chat_template", config.data.chat_template
    if given not in (None, TURNS) or config.task.kind != "chat":
        return present.chat_template(key, given)
    if not Path(config.ckpt).is_dir():
        return None  # of the Hub, or not there: reported where it is read
    from mlm.convert.source import open_source  # imports torch, which `mlm --help` does without

    try:
        return open_source(config.ckpt).template_problem(config.data.tokenizer, key=key)
    except (UserError, OSError):
        return None  # reported where they are read


def _incidents_are_followed(config: FinetuneConfig, _: Launch) -> Problem | None:
    if config.incident.action != "rewind":
        return None
    why = "finetuning reads every row once an epoch, and leaves none out"
    return Problem.at("incident.action", "rewind", why, "use incident.action=skip, log or stop")


def check_task(task: TaskConfig) -> list[Problem]:
    """Return every problem of a task, each with its keys below `task`."""
    from mlm.finetune.task_type import task_type  # late: loads tables and metrics

    try:
        kind = task_type(task.kind)
    except UserError as error:
        return list(error.problems)
    return [*kind.problems(task), *_label_range(task), *_metrics(task, kind), *_names(task)]


def _label_range(task: TaskConfig) -> list[Problem]:
    if task.label_range is None:
        return []
    low, high = task.label_range
    if math.isfinite(low) and math.isfinite(high) and low < high:
        return []
    problem = f"task.label_range={show([low, high])} must be the least and the largest label"
    return [Problem(("task.label_range",), problem)]


def _metrics(task: TaskConfig, kind: "TaskType") -> list[Problem]:
    known, problems = kind.metric_names or tuple(kind.metrics), list[Problem]()
    if not task.metrics or len(set(task.metrics)) < len(task.metrics):
        problem = f"task.metrics={show(list(task.metrics))} must be one or more, all different"
        problems.append(Problem(("task.metrics",), problem))
    for name in task.metrics:
        if name not in known:
            near = nearest(name, known)
            problem = f"task.metrics: '{name}' is none of kind {task.kind}'s ({', '.join(known)})"
            problems.append(Problem(("task.metrics",), problem, f"did you mean '{near}'?" if near else ""))
        elif (unsuited := kind.metric_problem(task, name)) is not None:
            problems.append(unsuited)
    return problems


def _names(task: TaskConfig) -> list[Problem]:
    problems = []
    if task.hub is not None and not HUB_NAME.fullmatch(task.hub):
        problems.append(Problem(("task.hub",), f"task.hub={task.hub} is no Hub dataset", "write OWNER/NAME"))
    splits = {"train": (task.train,), "validations": task.validations, "tests": task.tests}
    for key, names in (*splits.items(), ("subsets", task.subsets), ("submission", task.submission)):
        bad = [name for name in names if not FILE_NAME.fullmatch(name)]
        fix = "use letters, digits, - and _"
        problems += [Problem((f"task.{key}",), f"task.{key}: '{name}' is no name", fix) for name in bad]
    if not task.validations:
        problem = "task.validations=[]: no split to choose the best checkpoint on"
        problems.append(Problem(("task.validations",), problem, "name one"))
    if len(task.submission) > len(task.tests):
        problem = f"task.submission={show(list(task.submission))} has more names than task.tests"
        problems.append(Problem(("task.submission", "task.tests"), problem, "leave some out"))
    return problems


EVAL_TASK_RULES = (
    devices_exist,
    loss_scale_can_fall,
    checkpoint_exists,
    _rows_exist,
    lambda config, _: present.tokenizer("data.tokenizer", config.data.tokenizer),
    _chat_template_exists,
)
FINETUNE_RULES = (
    optimizer_works,
    optimizer_fits_layout,
    _incidents_are_followed,
    lr_falls,
    *EVAL_TASK_RULES,
)
