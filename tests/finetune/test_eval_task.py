"""`mlm eval TASK`: the same scores at every layout and batch size, splits, predictions, receipts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native.save_load import read_manifest
from mlm.finetune import evaluate
from mlm.finetune.config import EvalTaskConfig
from mlm.finetune.scoring import write_predictions
from mlm.finetune.splits import read_split
from mlm.finetune.task_type import Prediction
from mlm.parallel.config import ParallelConfig
from tests.finetune.material import RACE, SQUAD, bert, shipped, split_of
from tests.finetune.runs import (
    evaluation,
    finetune,
    finetuning,
    read,
    score,
    task_of,
    write_data,
)
from tests.ranks import command, run_on_ranks
from tests.slow import slow

KINDS = ("classification", "span")


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    for kind in KINDS:
        finetune(finetuning(folder, kind, out=str(folder / f"out-{kind}")))
    return folder


def of(folder: Path, kind: str, out: Path, **changes: Any) -> EvalTaskConfig:
    return evaluation(folder, kind, ckpt=str(folder / f"out-{kind}"), out=str(out), **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_receipt_has_the_scores_of_the_run_and_what_they_depend_on(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    found, tokenizer = score(of(folder, kind, tmp_path / "eval.json")), bert()
    (entry,) = found["results"]
    assert {entry["split"]: entry["metrics"]} == read(folder / f"out-{kind}/result.json")["scores"]
    best = next((folder / f"out-{kind}/best/checkpoints").glob("step-*"))
    assert (found["checkpoint"], found["checkpoint_digest"]) == (str(best), read_manifest(best).digest)
    split = read_split(task_of(kind), "validation", path=str(folder / kind))
    assert (entry["rows"], entry["digest"], entry["has_labels"]) == (9, split.digest, True)
    assert found["tokenizer_digest"] == tokenizer.digest
    assert found["vocabulary_digest"] == tokenizer.vocabulary_digest
    assert found["config"]["batch_size"] == 8
    assert found["finetuned_on"]["task.name"] == task_of(kind).name
    assert {"mlm", "torch", "tokenizers", "scikit-learn", "python"} <= found["versions"].keys()


def test_accuracy_has_the_standard_error_of_lm_eval(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry,) = score(of(folder, "classification", tmp_path / "eval.json"))["results"]
    right = round(9 * entry["metrics"]["accuracy"])
    assert 0 < right < 9
    theirs = pytest.importorskip("lm_eval.api.metrics").mean_stderr([1.0] * right + [0.0] * (9 - right))
    assert entry["standard_errors"] == {"accuracy": pytest.approx(theirs, rel=1e-12)}
    assert f"{theirs:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "batch_size", "parallel"),
    [
        ("classification", 3, ParallelConfig(tp=2)),
        slow(("span", 2, ParallelConfig(pp=2, vp=2))),
    ],
)
def test_predictions_do_not_depend_on_layout_and_batch_size(
    folder: Path, tmp_path: Path, kind: str, batch_size: int, parallel: ParallelConfig
) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    one = score(of(folder, kind, tmp_path / "one.json", predictions=str(whole)))
    changes = {"batch_size": batch_size, "parallel": parallel, "predictions": str(split)}
    config = of(folder, kind, tmp_path / "other.json", **changes)
    assert evaluate.preflight(config) == []
    run_on_ranks(command, evaluate.run, config, tp=parallel.tp, pp=parallel.pp, dp=parallel.dp or 1)
    other = read(tmp_path / "other.json")
    assert one["results"][0]["metrics"] == other["results"][0]["metrics"]
    name = {"classification": "validation.tsv", "span": "validation.json"}[kind]
    assert (whole / name).read_bytes() == (split / name).read_bytes()


def test_a_split_without_labels_is_predicted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = score(of(folder, "classification", tmp_path / "eval.json", split="test"))
    (entry,) = receipt["results"]
    assert (entry["metrics"], entry["has_labels"]) == ({}, False)
    assert entry["predictions"] == [str(tmp_path / "predictions/test.tsv")]
    table = (tmp_path / "predictions/test.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in table] == ["index", *map(str, range(5))]
    assert "no labels: predicted only" in capsys.readouterr().out
    changes = {"split": "test", "predictions": str(tmp_path / "a")}
    named = score(of(folder, "classification", tmp_path / "eval.json", **changes))
    assert named["results"][0]["predictions"] == [str(tmp_path / "a/test.tsv")]


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("bert", {}, "{} was not finetuned on a task: finetune it first, with `mlm finetune mine {}`"),
        ("out-span", {}, "{} was finetuned on squad, not on mine: use `mlm eval squad`"),
        (
            "out-classification",
            {"labels": ("no", "yes")},
            "{} has a head for 3 outputs per text, which is not that of task mine: finetune it first, "
            "with `mlm finetune mine {}`",
        ),
        (
            "out-classification",
            {"labels": ("a", "b", "c")},
            'task.labels=["a","b","c"]: {} was finetuned with ["no","yes","maybe"]; use '
            'task.labels=["no","yes","maybe"]',
        ),
    ],
)
def test_another_task_or_other_settings_are_rejected(
    folder: Path, name: str, changes: dict[str, Any], problem: str
) -> None:
    ckpt = folder / name
    config = evaluation(folder, ckpt=str(ckpt), task=replace(task_of("classification"), **changes))
    assert evaluate.preflight(config) == [problem.format(f"ckpt={ckpt}", f"ckpt={ckpt}")]


def test_bad_rows_are_found_before_any_rank_starts(folder: Path, tmp_path: Path) -> None:
    rows = write_data(tmp_path / "classification", "classification") / "validation.jsonl"
    rows.write_text(rows.read_text() + '{"first": "a", "second": "", "label": 1}\n')
    config = of(folder, "classification", tmp_path / "e.json", data={"path": str(rows.parent)})
    assert evaluate.preflight(config) == [
        f"{rows}:10: 'second' is empty: fill or delete it, or set task.allow_empty=true; "
        "data.bad_rows=skip leaves such rows out"
    ]


GLUE = {
    "cola": (["sentence"], 1, "CoLA.tsv", "1"),
    "stsb, too large": (["sentence1", "sentence2"], 5.2, "STS-B.tsv", "5.000"),
    "stsb, too small": (["sentence1", "sentence2"], -0.3, "STS-B.tsv", "0.000"),
    "rte": (["sentence1", "sentence2"], 0, "RTE.tsv", "entailment"),
}


def written(
    folder: Path, task: Any, records: list[dict[str, Any]], found: list[Prediction], name: str
) -> list[Path]:
    split = split_of(folder / "data", task, records, name=name)
    return write_predictions(task, split, found, folder / "out")


@pytest.mark.parametrize("case", GLUE)
def test_glue_tables_are_as_the_benchmark_takes_them(tmp_path: Path, case: str) -> None:
    """Scores of STS-B are clipped to their range."""
    columns, value, file, text = GLUE[case]
    records = [dict.fromkeys(columns, "a") | {"label": -1, "idx": n} for n in range(2)]
    found = [Prediction(str(n), value) for n in range(2)]
    (path,) = written(tmp_path, shipped(case.partition(",")[0]), records, found, "test")
    assert path.name == file
    assert path.read_text() == f"index\tprediction\n0\t{text}\n1\t{text}\n"


def test_race_and_squad_are_answers_by_question(tmp_path: Path) -> None:
    found = [Prediction("high7.txt-0", 3), Prediction("high7.txt-1", 0)]
    (path,) = written(tmp_path, shipped("race"), [RACE, RACE], found, "test")
    assert path.name == "test.json"
    assert json.loads(path.read_text()) == {"high7.txt-0": "D", "high7.txt-1": "A"}
    (path,) = written(tmp_path, shipped("squad_v2"), [SQUAD], [Prediction("q1", "café")], "validation")
    assert path.name == "validation.json"
    assert json.loads(path.read_text()) == {"q1": "café"}
