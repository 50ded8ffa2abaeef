"""Tasks: every shipped one is sound, problems of custom ones are named, `mlm eval` takes those of the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.cli.entry import main
from mlm.config.build import build, to_dict
from mlm.finetune.config import TaskConfig
from mlm.finetune.registry import check_task
from mlm.util.errors import ConfigError
from tests.finetune.runs import finetune, finetuning, read, task_of

STARS = replace(task_of("classification"), name="stars")
"""A task that no YAML holds, with a name like that of a shipped one (stsb)."""


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A run `out` on the task `stars`, and `squad` on a shipped one with settings of its own."""
    finetune(finetuning(folder, train={"epochs": 1}, task=STARS))
    finetune(finetuning(folder, "span", train={"epochs": 1}, out=str(folder / "squad")))
    return folder


OPTIONS = ("precision=fp64", "dist.device=cpu", "dist.threads_per_rank=1")


@pytest.mark.parametrize(
    ("task", "place"),
    [("stars", "out/best/checkpoints/step-*"), ("squad", "squad")],
)
def test_the_task_is_read_from_the_run(folder: Path, tmp_path: Path, task: str, place: str) -> None:
    """Of squad task.max_length=40 and task.doc_stride=4 of the run, not 384 and 128 of the YAML."""
    (ckpt,) = folder.glob(place)
    assert main(["eval", task, f"ckpt={ckpt}", f"out={tmp_path}/eval.json", *OPTIONS]) == 0
    found, trained = read(tmp_path / "eval.json"), read(folder / place.partition("/")[0] / "result.json")
    assert {entry["split"]: entry["metrics"] for entry in found["results"]} == trained["scores"]
    assert found["task_settings"] == to_dict(STARS if task == "stars" else task_of("span"))


def test_ones_own_yaml_stands_above_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = tmp_path / "tasks/task/stars.yaml"
    yaml.parent.mkdir(parents=True)
    yaml.write_text("name: stars\ncolumns: [first, second]\nmetrics: [macro_f1]\n")
    words = ["eval", "stars", f"--config-dir={tmp_path}/tasks", f"ckpt={folder}/out"]
    assert main([*words, f"out={tmp_path}/eval.json", *OPTIONS]) == 0
    found = read(tmp_path / "eval.json")
    assert found["task_settings"] == to_dict(replace(STARS, metrics=("macro_f1",)))
    assert list(found["results"][0]["metrics"]) == ["macro_f1"]
    yaml.write_text("name: stars\ncolumns: [first, second]\nmax_length: 30\n")
    assert main([*words, f"out={tmp_path}/eval.json", *OPTIONS]) == 2
    assert "task.max_length=30" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("other", "mlm eval: unknown task 'other'; the run was finetuned on stars"),
        ("star", "mlm eval: unknown task 'star'; did you mean 'stars'?"),
    ],
)
def test_another_task_is_rejected(
    folder: Path, capsys: pytest.CaptureFixture[str], task: str, problem: str
) -> None:
    assert main(["eval", task, f"ckpt={folder}/out"]) == 2
    assert capsys.readouterr().err == f"{problem}\n"


def test_code_that_a_run_names_is_not_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if typed by whoever passed the run on: data until the user names the module."""
    (tmp_path / "evil_task.py").write_text("open('was_run', 'w').close()\nTASK = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    saved = (folder / "out/config.yaml").read_text()
    (run / "config.yaml").write_text(saved.replace("kind: classification", "kind: evil_task:TASK"))
    assert "evil_task" in (run / "config.yaml").read_text()
    (run / "best").symlink_to(folder / "out/best")
    assert main(["eval", "stars", f"ckpt={run}", *OPTIONS]) == 2
    assert "named in a saved file, whose code is not run unasked" in capsys.readouterr().err
    assert not (tmp_path / "was_run").exists()


MINE = {"name": "mine", "columns": ["text"], "labels": ["no", "yes"]}
SPAN = {"name": "mine", "kind": "span", "columns": ["context", "question"], "metrics": ["f1"]}


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "three texts": (MINE | {"columns": ["a", "b", "c"]}, "kind classification has one or two columns"),
    "one column of a choice": (MINE | {"kind": "choice"}, "the columns of article, question and options"),
    "labels of numbers": (MINE | {"kind": "regression", "metrics": ["pearson"]}, "kind regression has none"),
    "a range upside down": (
        {"name": "m", "kind": "regression", "columns": ["a"], "metrics": ["pearson"], "label_range": [5, 0]},
        r"task.label_range=\[5.0,0.0\] must be",
    ),
    "unknown metric": (MINE | {"metrics": ["acuracy"]}, r"'acuracy' is none .*; did you mean 'accuracy'\?"),
    "f1 of three": (MINE | {"labels": ["a", "b", "c"], "metrics": ["f1"]}, "of 3 use macro_f1"),
    "no answers": (SPAN | {"metrics": ["no_answer_f1"]}, "needs task.unanswerable=true"),
    "a split that is a path": (MINE | {"tests": ["../test"]}, r"task.tests: '../test' is not a name"),
    "no validation": (MINE | {"validations": []}, "no split to choose the best checkpoint on"),
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
