"""What must hold of a task that a model is finetuned on."""

import math
import re

from mlm.config.build import show
from mlm.config.suggest import did_you_mean
from mlm.finetune.task_config import TaskConfig

METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1", "macro_f1", "accuracy_f1", "matthews"),
    "regression": ("pearson", "spearman", "pearson_spearman"),
    "choice": ("accuracy",),
    "span": ("f1", "exact_match", "has_answer_f1", "has_answer_exact_match", "no_answer_f1"),
}
"""What each kind of task can be scored by; mlm/finetune/metrics.py computes them."""
OF_TWO_LABELS = ("f1", "accuracy_f1")
OF_UNANSWERABLE = ("has_answer_f1", "has_answer_exact_match", "no_answer_f1")
COLUMNS = {
    "classification": ((1, 2), "one or two columns of texts"),
    "regression": ((1, 2), "one or two columns of texts"),
    "choice": ((3,), "the columns of article, question and options"),
    "span": ((2,), "the columns of context and question"),
}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILE_NAME = re.compile(r"[\w-][\w.-]*")


def check_task(task: TaskConfig) -> list[str]:
    """Every fault of a task, each naming a key below `task`."""
    return [*_columns_and_labels(task), *_metrics(task), *_names(task), *_lengths(task)]


def _columns_and_labels(task: TaskConfig) -> list[str]:
    faults = []
    counts, words = COLUMNS[task.kind]
    if len(task.columns) not in counts:
        faults.append(f"task.columns={show(list(task.columns))}: kind {task.kind} has {words}")
    if task.kind in ("classification", "choice"):
        if len(task.labels) < 2 or len(set(task.labels)) < len(task.labels):
            faults.append(
                f"task.labels={show(list(task.labels))} must be two or more names, all different, by number"
            )
    elif task.labels:
        faults.append(f"task.labels={show(list(task.labels))}: kind {task.kind} has none; leave it out")
    if task.label_range is not None:
        low, high = task.label_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            faults.append(f"task.label_range={show([low, high])} must be the least and the largest label")
    return faults


def _metrics(task: TaskConfig) -> list[str]:
    known, faults = METRICS[task.kind], []
    if not task.metrics or len(set(task.metrics)) < len(task.metrics):
        faults.append(f"task.metrics={show(list(task.metrics))} must be one or more, all different")
    for name in task.metrics:
        if name not in known:
            faults.append(
                f"task.metrics: '{name}' is none of kind {task.kind}'s ({', '.join(known)})"
                f"{did_you_mean(name, known)}"
            )
        elif name in OF_TWO_LABELS and task.kind == "classification" and len(task.labels) > 2:
            faults.append(f"task.metrics: {name} is of two labels; of {len(task.labels)} use macro_f1")
        elif name in OF_UNANSWERABLE and not task.unanswerable:
            faults.append(f"task.metrics: {name} needs task.unanswerable=true")
    return faults


def _names(task: TaskConfig) -> list[str]:
    faults = []
    if task.hub is not None and not HUB_NAME.fullmatch(task.hub):
        faults.append(f"task.hub={task.hub} is no Hub data set: write OWNER/NAME")
    splits = {"train": (task.train,), "validations": task.validations, "tests": task.tests}
    for key, names in (*splits.items(), ("subsets", task.subsets), ("submission", task.submission)):
        bad = [name for name in names if not FILE_NAME.fullmatch(name)]
        faults += [f"task.{key}: '{name}' is no name: use letters, digits, - and _" for name in bad]
    if not task.validations:
        faults.append("task.validations=[]: name a split to choose the best checkpoint on")
    if len(task.submission) > len(task.tests):
        faults.append(
            f"task.submission={show(list(task.submission))} has more names than task.tests: leave some out"
        )
    return faults


def _lengths(task: TaskConfig) -> list[str]:
    faults = []
    for key in ("max_length", "max_answer_length", "n_best", "question_length"):
        value = getattr(task, key)
        if value is not None and value <= 0:
            faults.append(f"task.{key}={value} must be greater than 0")
    if task.doc_stride < 0:
        faults.append(f"task.doc_stride={task.doc_stride} must be 0 or more")
    if task.kind == "span" and task.doc_stride >= task.max_length // 2:
        faults.append(
            f"task.doc_stride={task.doc_stride} must be less than half of task.max_length={task.max_length}: "
            f"windows must move on"
        )
    return faults
