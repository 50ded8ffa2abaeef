"""Files of predictions, to the letter."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlm.finetune.scoring import write_predictions
from mlm.finetune.task_type import Prediction
from tests.finetune.material import RACE, SQUAD, shipped, split_of

GLUE = {
    "cola": (["sentence"], 1, "CoLA.tsv", "1"),
    "sst2": (["sentence"], 0, "SST-2.tsv", "0"),
    "mrpc": (["sentence1", "sentence2"], 1, "MRPC.tsv", "1"),
    "stsb": (["sentence1", "sentence2"], 3.14159, "STS-B.tsv", "3.142"),
    "stsb, too large": (["sentence1", "sentence2"], 5.2, "STS-B.tsv", "5.000"),
    "stsb, too small": (["sentence1", "sentence2"], -0.3, "STS-B.tsv", "0.000"),
    "qqp": (["question1", "question2"], 0, "QQP.tsv", "0"),
    "qnli": (["question", "sentence"], 1, "QNLI.tsv", "not_entailment"),
    "rte": (["sentence1", "sentence2"], 0, "RTE.tsv", "entailment"),
    "wnli": (["sentence1", "sentence2"], 1, "WNLI.tsv", "1"),
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


def test_race_is_answers_by_question(tmp_path: Path) -> None:
    found = [Prediction("high7.txt-0", 3), Prediction("high7.txt-1", 0)]
    (path,) = written(tmp_path, shipped("race"), [RACE, RACE], found, "test")
    assert path.name == "test.json"
    assert json.loads(path.read_text()) == {"high7.txt-0": "D", "high7.txt-1": "A"}


def test_squad_is_texts_by_question(tmp_path: Path) -> None:
    (path,) = written(tmp_path, shipped("squad_v2"), [SQUAD], [Prediction("q1", "café")], "validation")
    assert path.name == "validation.json"
    assert json.loads(path.read_text()) == {"q1": "café"}
