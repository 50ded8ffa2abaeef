"""The types of task by `task.kind`, and the checks of a task's settings.

`task.kind` names a shipped type, or a custom one by its import path, `my_package.my_module:TASK`: an instance
of a subclass of `TaskType`, in a module that mlm/config/imports.py trusts.
"""

import math
import re

from mlm.config.imports import imported
from mlm.config.suggest import nearest
from mlm.finetune.chat import CHAT, PREFERENCES
from mlm.finetune.classification import CHOICE, CLASSIFICATION, REGRESSION
from mlm.finetune.config import SHIPPED, TaskConfig
from mlm.finetune.metrics import EXTRA
from mlm.finetune.span import SPAN
from mlm.finetune.task_type import TaskType
from mlm.util.errors import Problem, UserError, format_value
from mlm.util.extras import load_extra

TASK_TYPES = dict(zip(SHIPPED, (CLASSIFICATION, REGRESSION, CHOICE, SPAN, CHAT, PREFERENCES), strict=True))


def task_type(kind: str) -> TaskType:
    custom = imported("task.kind", kind, SHIPPED, TaskType)
    return TASK_TYPES[kind] if custom is None else custom


def check_installed(task: TaskConfig) -> None:
    """Raise UserError if a package is missing, before training rather than at its first validation."""
    for module in task_type(task.kind).modules:
        load_extra(module, f"task={task.name}", EXTRA)


def check_task(task: TaskConfig) -> list[Problem]:
    try:
        kind = task_type(task.kind)
    except UserError as error:
        return list(error.problems)
    problems, (low, high) = kind.problems(task), task.label_range or (0.0, 1.0)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        problem = f"task.label_range={format_value([low, high])} must be the least and the largest label"
        problems.append(Problem(("task.label_range",), problem))
    names = kind.metric_names or tuple(kind.metrics)
    if not task.metrics or len(set(task.metrics)) < len(task.metrics):
        problem = f"task.metrics={format_value(list(task.metrics))} must be one or more, all different"
        problems.append(Problem(("task.metrics",), problem))
    for name in task.metrics:
        if name not in names:
            near = nearest(name, names)
            problem = f"task.metrics: '{name}' is none of kind {task.kind}'s ({', '.join(names)})"
            problems.append(Problem(("task.metrics",), problem, f"did you mean '{near}'?" if near else ""))
        elif (unsuited := kind.metric_problem(task, name)) is not None:
            problems.append(unsuited)
    if task.hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", task.hub):
        problem = f"task.hub={task.hub} is not a Hub dataset"
        problems.append(Problem(("task.hub",), problem, "write OWNER/NAME"))
    splits = {"train": (task.train,), "validations": task.validations, "tests": task.tests}
    for key, values in (*splits.items(), ("subsets", task.subsets), ("submission", task.submission)):
        bad = [name for name in values if not re.fullmatch(r"[\w-][\w.-]*", name)]
        fix = "use letters, digits, - and _"
        problems += [Problem((f"task.{key}",), f"task.{key}: '{name}' is not a name", fix) for name in bad]
    if not task.validations:
        problem = "task.validations=[]: no split to choose the best checkpoint on"
        problems.append(Problem(("task.validations",), problem, "name one"))
    if len(task.submission) > len(task.tests):
        problem = f"task.submission={format_value(list(task.submission))} has more names than task.tests"
        problems.append(Problem(("task.submission", "task.tests"), problem, "leave some out"))
    return problems
