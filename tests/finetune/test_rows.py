"""Splits: the same rows from every form of file, and from the Hub."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlm.finetune.splits import TokenizedSplit, read_split
from mlm.util.errors import UserError
from tests.finetune.material import (
    PAIR,
    RACE,
    SQUAD,
    STS,
    pairs,
    shipped,
    split_of,
    write_rows,
    write_table,
)

ROWS = [PAIR, PAIR | {"first": '"Who" sat naïve ?', "label": 0, "idx": 1}]


@pytest.mark.parametrize(
    "name",
    [
        *("train.jsonl", "train.json", "train.parquet", "train.csv", "train.tsv", "train.jsonl.gz"),
        *("train-00000-of-00001.jsonl", "data/train-00000-of-00001-0123456789abcdef.parquet"),
    ],
)
def test_rows_and_digest_are_the_same_from_every_form(tmp_path: Path, name: str) -> None:
    wanted = split_of(tmp_path / "wanted", pairs(), ROWS)
    write_table(tmp_path / name, ROWS)
    found = read_split(pairs(), "train", path=str(tmp_path))
    assert list(found.rows) == list(wanted.rows)
    assert found.digest == wanted.digest
    assert found.has_labels
    assert len(found.locations) == 2
    assert found.locations[1].startswith(f"{tmp_path / name}:")


def test_digest_of_scores_does_not_depend_on_bytes_per_number(tmp_path: Path) -> None:
    task = shipped("stsb")
    wanted = split_of(tmp_path / "a", task, [STS])
    schema = pa.schema(
        [("sentence1", pa.string()), ("sentence2", pa.string()), ("label", pa.float32()), ("idx", pa.int32())]
    )
    pq.write_table(pa.Table.from_pylist([STS], schema=schema), tmp_path / "train.parquet")
    assert read_split(task, "train", path=str(tmp_path)).digest == wanted.digest


def test_rows_of_a_split_are_those_of_its_parts_and_of_no_second_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "dev_matched.jsonl", [PAIR])
    assert len(read_split(pairs(), "validation_matched", path=str(tmp_path))) == 1
    for n, row in enumerate(ROWS):
        write_table(tmp_path / f"train-0000{n}-of-00002.jsonl", [row])
    found = read_split(pairs(), "train", path=str(tmp_path))
    first, second = ROWS
    assert found.digest == split_of(tmp_path / "same", pairs(), ROWS).digest
    changed = [ROWS[::-1], [first], [first | {"label": 0}, second], [first | {"first": "b"}, second]]
    digests = {split_of(tmp_path / str(n), pairs(), rows).digest for n, rows in enumerate(changed)}
    assert len(digests | {found.digest}) == 5
    write_table(tmp_path / "same" / "train.csv", ROWS)
    with pytest.raises(UserError, match=r"both .*train\.jsonl and .*train\.csv hold the split train"):
        read_split(pairs(), "train", path=str(tmp_path / "same"))


def test_labels_are_read_by_name_and_number(tmp_path: Path) -> None:
    rows = [PAIR | {"label": label} for label in ("yes", 1, "1", 1.0, "no", 0)]
    assert [row.label for row in split_of(tmp_path, pairs(), rows).rows] == [1, 1, 1, 1, 0, 0]


def test_rows_read_as_another_form_are_counted(tmp_path: Path) -> None:
    rows = [{"instruction": "Sing", "output": "la"}] * 2 + [{"prompt": "Sing", "completion": "la"}]
    split = split_of(tmp_path, shipped("chat"), rows)
    (note,) = TokenizedSplit(split=split, examples=(), truncated=0, excluded_samples=0, max_length=9).notes()
    assert note.endswith("2 rows of train: instruction, input and output read as messages")


def test_columns_of_a_file_are_read_by_the_names_of_the_task(tmp_path: Path) -> None:
    wanted = split_of(
        tmp_path / "a", shipped("preferences"), [{"prompt": "q", "chosen": "a", "rejected": "b"}]
    )
    path = write_rows(tmp_path / "b.jsonl", [{"ask": "q", "chosen": "a", "worse": "b", "prompt": "other"}])
    columns = {"prompt": "ask", "rejected": "worse"}
    found = read_split(shipped("preferences"), "train", path=str(path), columns=columns)
    assert found.digest == wanted.digest
    assert found.rows[0].changes == ("prompt read from the column ask, rejected read from the column worse",)


def race_folder(folder: Path, *subsets: str) -> Path:
    """RACE as it is published: an article with its questions in each .txt."""
    for subset in subsets:
        article = {
            "id": f"{subset}7.txt",
            "article": RACE["article"],
            "questions": ["Who sat ?", "Who _ ?"],
            "options": [RACE["options"], RACE["options"]],
            "answers": ["A", "D"],
        }
        (folder / "dev" / subset).mkdir(parents=True)
        (folder / "dev" / subset / "7.txt").write_text(json.dumps(article))
    return folder


@pytest.mark.parametrize(
    "name, ids",
    [
        ("race", ["middle7.txt-0", "middle7.txt-1", "high7.txt-0", "high7.txt-1"]),
        ("race_high", ["high7.txt-0", "high7.txt-1"]),
    ],
)
def test_race_as_published(tmp_path: Path, name: str, ids: list[str]) -> None:
    split = read_split(shipped(name), "validation", path=str(race_folder(tmp_path, "middle", "high")))
    assert [row.id for row in split.rows] == ids
    assert [row.label for row in split.rows[:2]] == [0, 3]
    assert split.rows[0].texts == ("A cat sat .", "Who sat ?")
    assert split.locations[1].endswith("7.txt:question 2")


def test_race_of_one_file_leaves_out_the_other_school(tmp_path: Path) -> None:
    rows = [RACE, RACE | {"example_id": "middle1.txt"}, RACE]
    split = split_of(tmp_path, shipped("race_high"), rows)
    assert [row.id for row in split.rows] == ["high7.txt-0", "high7.txt-1"]
    with pytest.raises(UserError, match=r"1 have an example_id that begins with none of task\.subsets="):
        split_of(tmp_path, shipped("race"), [RACE | {"example_id": "7"}])


def test_race_by_folders_as_on_the_hub(tmp_path: Path) -> None:
    write_rows(tmp_path / "high/test.jsonl", [RACE | {"example_id": "high1.txt"}])
    with pytest.raises(UserError, match="has no folder middle"):
        read_split(shipped("race"), "test", path=str(tmp_path))
    write_rows(tmp_path / "middle/test.jsonl", [RACE | {"example_id": "middle1.txt"}])
    assert len(read_split(shipped("race"), "test", path=str(tmp_path))) == 2
    assert len(read_split(shipped("race_high"), "test", path=str(tmp_path))) == 1


def test_squad_as_published(tmp_path: Path) -> None:
    qa = {"id": "q1", "question": SQUAD["question"], "answers": [{"text": "cat", "answer_start": 8}]}
    qas = [qa, qa | {"id": "q2", "answers": [], "is_impossible": True}]
    paragraph = {"context": SQUAD["context"], "qas": qas}
    content = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [paragraph]}]}
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(content))
    split = read_split(shipped("squad_v2"), "validation", path=str(tmp_path))
    assert [(row.id, row.label) for row in split.rows] == [("q1", (("cat", 8),)), ("q2", ())]
    assert split.locations[1].endswith("dev-v2.0.json:article 1 paragraph 1 question 2")


def test_hub_is_read_by_name_and_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"sentence": "a cat", "label": 1, "idx": 0}, {"sentence": "a dog", "label": 0, "idx": 1}]
    file = str(write_rows(tmp_path / "rows.jsonl", rows))
    real, calls = datasets.load_dataset, []

    def stand_in(path: str, name: str | None = None, *, split: str) -> Any:
        calls.append((path, name))
        return real("json", data_files={split: file}, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    found = read_split(shipped("sst2"), "validation", path=None)
    assert calls == [("hf://datasets/nyu-mll/glue", "sst2")]
    assert found.digest == split_of(tmp_path / "local", shipped("sst2"), rows, name="validation").digest
    assert found.locations[1] == "nyu-mll/glue sst2 validation row 2"
    assert found.source == "nyu-mll/glue sst2"


def test_hub_out_of_reach_says_what_to_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, name: str | None = None, *, split: str) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"ConnectionError: no route.*train\.jsonl .* give data\.path="):
        read_split(shipped("rte"), "train", path=None)
