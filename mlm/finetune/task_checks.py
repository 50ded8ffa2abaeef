"""Checks of a task that a model is finetuned on."""

import math
import re
from typing import TYPE_CHECKING

from mlm.config.suggest import nearest
from mlm.finetune.task_config import TaskConfig
from mlm.util.errors import Problem, UserError, show

if TYPE_CHECKING:
    from mlm.finetune.task_type import TaskType

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILE_NAME = re.compile(r"[\w-][\w.-]*")


def check_task(task: TaskConfig) -> list[Problem]:
    """Return every problem of a task, each with its keys below `task`."""
    from mlm.finetune.task_type import task_type  # imports torch, which `mlm --help` does without

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
    known, found = kind.metric_names, list[Problem]()
    if not task.metrics or len(set(task.metrics)) < len(task.metrics):
        problem = f"task.metrics={show(list(task.metrics))} must be one or more, all different"
        found.append(Problem(("task.metrics",), problem))
    for name in task.metrics:
        if name not in known:
            near = nearest(name, known)
            problem = f"task.metrics: '{name}' is none of kind {task.kind}'s ({', '.join(known)})"
            found.append(Problem(("task.metrics",), problem, f"did you mean '{near}'?" if near else ""))
        elif (unsuited := kind.metric_problem(task, name)) is not None:
            found.append(unsuited)
    return found


def _names(task: TaskConfig) -> list[Problem]:
    found = []
    if task.hub is not None and not HUB_NAME.fullmatch(task.hub):
        found.append(Problem(("task.hub",), f"task.hub={task.hub} is no Hub dataset", "write OWNER/NAME"))
    splits = {"train": (task.train,), "validations": task.validations, "tests": task.tests}
    for key, names in (*splits.items(), ("subsets", task.subsets), ("submission", task.submission)):
        bad = [name for name in names if not FILE_NAME.fullmatch(name)]
        fix = "use letters, digits, - and _"
        found += [Problem((f"task.{key}",), f"task.{key}: '{name}' is no name", fix) for name in bad]
    if not task.validations:
        problem = "task.validations=[]: no split to choose the best checkpoint on"
        found.append(Problem(("task.validations",), problem, "name one"))
    if len(task.submission) > len(task.tests):
        problem = f"task.submission={show(list(task.submission))} has more names than task.tests"
        found.append(Problem(("task.submission", "task.tests"), problem, "leave some out"))
    return found
