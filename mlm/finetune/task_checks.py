"""Checks of a task that a model is finetuned on."""

import math
import re
from typing import TYPE_CHECKING

from mlm.config.suggest import did_you_mean
from mlm.errors import UserError, show
from mlm.finetune.task_config import TaskConfig

if TYPE_CHECKING:
    from mlm.finetune.task_type import TaskType

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILE_NAME = re.compile(r"[\w-][\w.-]*")


def check_task(task: TaskConfig) -> list[str]:
    """Return every problem of a task, each naming a key below `task`."""
    from mlm.finetune.task_type import task_type  # imports torch, which `mlm --help` does without

    try:
        kind = task_type(task.kind)
    except UserError as error:
        return [str(error)]
    return [*kind.problems(task), *_label_range(task), *_metrics(task, kind), *_names(task), *_lengths(task)]


def _label_range(task: TaskConfig) -> list[str]:
    if task.label_range is None:
        return []
    low, high = task.label_range
    if math.isfinite(low) and math.isfinite(high) and low < high:
        return []
    return [f"task.label_range={show([low, high])} must be the least and the largest label"]


def _metrics(task: TaskConfig, kind: "TaskType") -> list[str]:
    known, found = kind.metric_names, list[str]()
    if not task.metrics or len(set(task.metrics)) < len(task.metrics):
        found.append(f"task.metrics={show(list(task.metrics))} must be one or more, all different")
    for name in task.metrics:
        if name not in known:
            found.append(
                f"task.metrics: '{name}' is none of kind {task.kind}'s ({', '.join(known)})"
                f"{did_you_mean(name, known)}"
            )
        elif problem := kind.metric_problem(task, name):
            found.append(problem)
    return found


def _names(task: TaskConfig) -> list[str]:
    problems = []
    if task.hub is not None and not HUB_NAME.fullmatch(task.hub):
        problems.append(f"task.hub={task.hub} is no Hub data set: write OWNER/NAME")
    splits = {"train": (task.train,), "validations": task.validations, "tests": task.tests}
    for key, names in (*splits.items(), ("subsets", task.subsets), ("submission", task.submission)):
        bad = [name for name in names if not FILE_NAME.fullmatch(name)]
        problems += [f"task.{key}: '{name}' is no name: use letters, digits, - and _" for name in bad]
    if not task.validations:
        problems.append("task.validations=[]: name a split to choose the best checkpoint on")
    if len(task.submission) > len(task.tests):
        problems.append(
            f"task.submission={show(list(task.submission))} has more names than task.tests: leave some out"
        )
    return problems


def _lengths(task: TaskConfig) -> list[str]:
    problems = []
    for key in ("max_length", "max_answer_length", "n_best", "question_length"):
        value = getattr(task, key)
        if value is not None and value <= 0:
            problems.append(f"task.{key}={value} must be greater than 0")
    if task.doc_stride < 0:
        problems.append(f"task.doc_stride={task.doc_stride} must be 0 or more")
    return problems
