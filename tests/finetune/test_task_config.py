"""Every shipped task builds without a problem; problems of custom tasks are named."""

from typing import Any

import pytest
import yaml

from mlm.config.build import build
from mlm.config.paths import CONFIG_DIR, groups
from mlm.config.tree import leaves
from mlm.finetune.config import SHIPPED, TaskConfig
from mlm.finetune.registry import check_task, task_type
from mlm.util.errors import ConfigError

TASKS = groups(CONFIG_DIR)["task"]
MINE = {"name": "mine", "columns": ["text"], "labels": ["no", "yes"]}
SPAN = {"name": "mine", "kind": "span", "columns": ["context", "question"], "metrics": ["f1"]}


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIG_DIR / "task" / f"{name}.yaml").read_text())


def test_all_of_glue_and_race_and_squad_are_there() -> None:
    glue = {"cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"}
    others = ("race", "race_middle", "race_high", "squad", "squad_v2", "chat", "preferences")
    assert set(TASKS) == glue.union(others)


@pytest.mark.parametrize("name", TASKS)
def test_shipped_task_has_no_problem(name: str) -> None:
    task = build(TaskConfig, content(name))
    assert check_task(task) == []
    assert task.name == name


@pytest.mark.parametrize(
    "name, lr, epochs, batch",
    [("mnli", 1e-5, 10, 128), ("qqp", 5e-5, 12, 128), ("race", 2e-5, 3, 32), ("squad", 3e-5, 2, 64)],
)
def test_tasks_of_v1_have_its_settings_for_336m(name: str, lr: float, epochs: int, batch: int) -> None:
    """arXiv:1909.08053, table 6."""
    text = content(name)
    assert (text["lr"], text["epochs"], text["batch_size"]) == (lr, epochs, batch)


@pytest.mark.parametrize("kind", SHIPPED)
def test_every_metric_is_in_the_help(kind: str) -> None:
    names = task_type(kind).metric_names or task_type(kind).metrics
    assert names
    assert all(name in leaves(TaskConfig)["metrics"].doc for name in names)


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "three texts": (MINE | {"columns": ["a", "b", "c"]}, "kind classification has one or two columns"),
    "one column of a choice": (MINE | {"kind": "choice"}, "the columns of article, question and options"),
    "one label": (MINE | {"labels": ["no"]}, "two or more names"),
    "labels of numbers": (MINE | {"kind": "regression", "metrics": ["pearson"]}, "kind regression has none"),
    "a range upside down": (
        {"name": "m", "kind": "regression", "columns": ["a"], "metrics": ["pearson"], "label_range": [5, 0]},
        r"task.label_range=\[5.0,0.0\] must be",
    ),
    "unknown metric": (MINE | {"metrics": ["acuracy"]}, r"'acuracy' is none .*; did you mean 'accuracy'\?"),
    "metric of another kind": (MINE | {"metrics": ["exact_match"]}, "is none of kind classification's"),
    "no metric": (MINE | {"metrics": []}, "one or more"),
    "f1 of three": (MINE | {"labels": ["a", "b", "c"], "metrics": ["f1"]}, "of 3 use macro_f1"),
    "no answers": (SPAN | {"metrics": ["no_answer_f1"]}, "needs task.unanswerable=true"),
    "a hub of one word": (MINE | {"hub": "glue"}, "write OWNER/NAME"),
    "a split that is a path": (MINE | {"tests": ["../test"]}, r"task.tests: '../test' is no name"),
    "no validation": (MINE | {"validations": []}, "no split to choose the best checkpoint on"),
    "too many files": (MINE | {"submission": ["A", "B"]}, "more names than task.tests"),
    "windows that stand": (SPAN | {"max_length": 256}, "task.doc_stride=128 must be less than half"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problem_of_a_task_names_its_key(case: str) -> None:
    values, message = PROBLEMS[case]
    problems = check_task(build(TaskConfig, values))
    assert len(problems) == 1
    assert all(key.startswith("task.") for key in problems[0].keys)
    assert problems[0].keys
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(problems)
