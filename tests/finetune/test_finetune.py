"""`mlm finetune` from its settings to what it leaves behind: the best checkpoint, early stop, tests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm.checkpoint.native.folders import checkpoints
from mlm.checkpoint.native.save_load import read_manifest
from mlm.finetune.classification import Classification
from mlm.finetune.config import FinetuneCheckpointConfig
from mlm.finetune.scoring import Scorer
from mlm.finetune.splits import TokenizedSplit
from mlm.finetune.task_type import Prediction
from tests.finetune.runs import (
    evaluation,
    finetune,
    finetuning,
    json_lines,
    read,
    records,
    score,
    task_of,
    weights,
    write_data,
)

STEPS = 6  # 11 rows in batches of 4, 2 epochs


def scoring(monkeypatch: pytest.MonkeyPatch, *accuracies: float) -> None:
    """Let validations come out so, one after the other; all after them are 0."""
    found = iter(accuracies)
    monkeypatch.setattr(Scorer, "score", lambda *a, **k: ({"accuracy": next(found, 0.0), "f1": 1.0}, []))


def test_the_checkpoint_of_the_best_validation_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring(monkeypatch, 0.3, 0.7, 0.6, 0.5)
    result = finetune(finetuning(folder, out=str(tmp_path), train={"validate_every": 1}))
    assert (result["best_step"], result["steps"]) == (2, STEPS)
    assert result["scores"] == {"validation": {"accuracy": 0.7, "f1": 1.0}}
    assert set(checkpoints(tmp_path / "best/checkpoints")) == {2}
    assert all(name.startswith("model.") for name in weights(tmp_path / "best/checkpoints"))
    assert set(checkpoints(tmp_path / "checkpoints")) == {STEPS}


def test_the_first_split_and_its_first_metric_decide_on_the_best(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"one": iter([0.1, 0.2, 0.1]), "two": iter([0.9, 0.1, 0.95])}

    def scored(self: Scorer, tokenized: TokenizedSplit, **options: Any) -> Any:
        value = next(made[tokenized.split.name])
        return {"accuracy": value, "macro_f1": 1 - value}, []

    monkeypatch.setattr(Scorer, "score", scored)
    data = write_data(tmp_path / "data", "classification")
    for name in made:
        (data / f"{name}.jsonl").write_bytes((data / "validation.jsonl").read_bytes())
    changes: dict[str, Any] = {"validations": ("one", "two"), "metrics": ("accuracy", "macro_f1")}
    task = replace(task_of("classification"), **changes)
    changes = {"data": {"path": str(data)}, "train": {"validate_every": 2}}
    result = finetune(finetuning(folder, task=task, out=str(tmp_path / "o"), **changes))
    assert result["best_step"] == 4
    assert result["scores"]["two"] == {"accuracy": 0.1, "macro_f1": 0.9}


@pytest.mark.parametrize(
    "every, expected",
    [((4, 0), ([4, 6], [4, 6])), ((None, 4), ([3, 6], [4, 6]))],
)
def test_a_run_validates_and_saves_as_often_as_asked(
    folder: Path, tmp_path: Path, every: Any, expected: Any
) -> None:
    """`every` is (train.validate_every, checkpoint.save_every), `expected` the steps of both."""
    train, keep = {"validate_every": every[0]}, FinetuneCheckpointConfig(save_every=every[1], keep_last=2)
    finetune(finetuning(folder, out=str(tmp_path), train=train, checkpoint=keep))
    steps = tuple([record["step"] for record in records(tmp_path, kind)] for kind in ("scores", "saved"))
    assert steps == expected
    assert sorted(checkpoints(tmp_path / "checkpoints")) == expected[1]


def test_a_run_ends_when_patience_does(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scoring(monkeypatch, 0.5, 0.4, 0.6, 0.5, 0.6)
    train = {"validate_every": 1, "patience": 2}
    rarely = FinetuneCheckpointConfig(save_every=100)
    result = finetune(finetuning(folder, out=str(tmp_path), train=train, checkpoint=rarely))
    assert result["steps"] == 5
    assert set(checkpoints(tmp_path / "checkpoints")) == {5}


def test_tests_are_predicted_with_the_best_weights(folder: Path, tmp_path: Path) -> None:
    predict = {"predict_tests": True}
    result = finetune(finetuning(folder, "choice", out=str(tmp_path / "out"), data=predict))
    assert result["predictions"] == [str(tmp_path / "out/predictions/test.json")]
    answers = {f"{r['example_id']}-0": r["answer"] for r in json_lines(folder / "choice/test.jsonl")}
    said = read(tmp_path / "out/predictions/test.json")
    assert result["tests"] == {"test": {"accuracy": sum(said[k] == v for k, v in answers.items()) / 5}}
    changes = {"ckpt": str(tmp_path / "out"), "split": "test", "predictions": str(tmp_path)}
    saved = score(evaluation(folder, "choice", **changes))
    assert saved["results"][0]["metrics"] == result["tests"]["test"]
    assert read(tmp_path / "test.json") == said


def test_a_finetuned_run_gives_its_best_weights(folder: Path, tmp_path: Path) -> None:
    """First one task, then another: the body is that of the best checkpoint, the head is new."""
    finetune(finetuning(folder, out=str(tmp_path / "first")))
    second = finetuning(folder, "choice", ckpt=str(tmp_path / "first"), out=str(tmp_path / "second"))
    finetune(second)
    best = read_manifest(next((tmp_path / "first/best/checkpoints").glob("step-*")))
    assert read(tmp_path / "second/result.json")["depends_on"]["ckpt"] == best.digest


def test_seeds_differ_in_head_order_and_dropout_alone(folder: Path, tmp_path: Path) -> None:
    tiny = {"optimizer": replace(finetuning(folder).optimizer, lr=1e-30), "train": {"epochs": 1}}
    made = []
    for seed in (1, 2):
        finetune(finetuning(folder, out=str(tmp_path / f"{seed}"), seed=seed, **tiny))
        made.append(weights(tmp_path / f"{seed}/best/checkpoints"))
    start = weights(folder / "bert/checkpoints")
    heads = [name for name in made[0] if not torch.allclose(made[0][name], made[1][name])]
    assert heads == ["model.classifier.weight"]
    assert all(torch.allclose(made[0][n], start[n]) for n in made[0] if n in start)


def test_classifier_that_predicts_one_label_is_warned_of(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Classification, "predict", lambda self, task, row, *_: Prediction(row.id, 1))
    finetune(finetuning(folder, out=str(tmp_path)))
    assert "all 9 rows of validation are predicted yes" in capsys.readouterr().err
    score(evaluation(folder, ckpt=str(tmp_path)))
    assert "all 9 rows of validation are predicted yes" in capsys.readouterr().out
