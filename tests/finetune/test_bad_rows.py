"""Problems are reported by file and row, and nothing is executed."""

from pathlib import Path
from typing import Any

import pytest

from mlm.finetune.splits import read_split
from mlm.util.errors import UserError
from tests.finetune.material import PAIR, RACE, SQUAD, STS, TALK, pairs, shipped, split_of, write_rows
from tests.hostile.files import payloads

CHOSEN = {"prompt": "a", "chosen": "b", "rejected": "c"}
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no label": ("mine", PAIR | {"label": None}, "no label"),
    "unknown number": ("mine", PAIR | {"label": 2}, "label=2 is not a label: use 0 to 1 or a name"),
    "true for a label": ("mine", PAIR | {"label": True}, "label=True is not a label"),
    "empty text": ("mine", PAIR | {"second": " \n"}, "'second' is empty"),
    "number for a text": ("mine", PAIR | {"first": 3}, "'first' holds an integer, not a text"),
    "half a surrogate": ("mine", PAIR | {"first": "\ud800"}, "'first' holds half a surrogate pair"),
    "a list for an id": ("mine", PAIR | {"idx": [1]}, "'idx' holds a list"),
    "score too low": ("stsb", STS | {"label": -0.5}, "label=-0.5 is not in 0 to 5"),
    "infinite score": ("stsb", STS | {"label": "inf"}, "label='inf' is not a number"),
    "no score": ("stsb", STS | {"label": -1}, "no label"),
    "three options": ("race", RACE | {"options": list("abc")}, "'options' holds 3 options, task.labels 4"),
    "unknown answer": ("race", RACE | {"answer": "E"}, r"answer='E' is not a label: .*\(A, B, C, D\)"),
    "SQuAD 2.0 as 1.1": (
        "squad", SQUAD | {"answers": {"text": [], "answer_start": []}, "is_impossible": True},
        "has no answer, as in SQuAD 2.0: use task=squad_v2",
    ),
    "answer elsewhere": (
        "squad", SQUAD | {"answers": {"text": ["cat"], "answer_start": [7]}},
        "answer_start=7 of 'answers' is not where 'cat' is: the context has ' ca' there",
    ),
    "answers without starts": (
        "squad", SQUAD | {"answers": {"text": ["cat"], "answer_start": []}}, "not as many text as",
    ),
    "SQuAD 2.0 of the Hub as 1.1": (
        "squad", SQUAD | {"answers": {"text": [], "answer_start": []}}, "no label",
    ),
    "no rejected answer": ("preferences", {"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
    "equal answers": ("preferences", CHOSEN | {"rejected": "b"}, "'chosen' and 'rejected' are equal"),
    "no messages before an answer": (
        "preferences", {"prompt": [], "chosen": [{"role": "user", "content": "b"}], "rejected": []},
        "'prompt': no list of messages",
    ),
    "system beside texts": (
        "preferences", {"chosen": "a b", "rejected": "a c", "system": "x"},
        "'system' is not read beside answers that are texts",
    ),
    "no answer of the assistant": (
        "chat", {"messages": TALK[:1]},
        "'messages' has no message of the assistant: add the answer, or delete the row",
    ),
}  # fmt: skip
GOOD = {
    **{"mine": PAIR, "stsb": STS, "race": RACE, "squad": SQUAD},
    **{"preferences": CHOSEN, "chat": {"messages": TALK}},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_row_is_named_by_file_and_row(tmp_path: Path, case: str) -> None:
    name, record, message = BAD[case]
    task = pairs() if name == "mine" else shipped(name)
    rows = [row | {"id": f"q{n}"} for n, row in enumerate([GOOD[name], record, GOOD[name]])]
    path = write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(UserError, match=rf"^{path}:2: .*{message}") as caught:
        read_split(task, "train", path=str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 2


def test_question_with_the_id_of_another_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.jsonl:2: id='q1' is another row's too"):
        split_of(tmp_path, shipped("squad"), [SQUAD, SQUAD])


def test_many_bad_rows_are_ten_lines_and_a_count(tmp_path: Path) -> None:
    rows = [PAIR | {"label": 7 if n % 2 else 1} for n in range(64)]
    with pytest.raises(UserError) as caught:
        split_of(tmp_path, pairs(), rows)
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "and 22 more rows like these; data.bad_rows=skip leaves such rows out"
    assert "train.jsonl:20: label=7" in lines[9]


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_split_without_labels_is_not_a_bad_row_each(tmp_path: Path, name: str) -> None:
    rows = [PAIR | {"label": -1}, PAIR | {"label": -1, "second": ""}]
    with pytest.raises(UserError) as caught:
        split_of(tmp_path, pairs(), rows, name=name)
    *others, last = str(caught.value).splitlines()
    assert f"{name}.jsonl:2: 'second' is empty" in last
    assert last.endswith("; data.bad_rows=skip leaves such rows out")
    needed = [f"no row of split {name} has a label" in line for line in others]
    assert needed == [True] * (name != "test")


@pytest.mark.parametrize("withheld", [-1, None])
def test_test_split_without_labels_can_only_be_predicted(tmp_path: Path, withheld: Any) -> None:
    split = split_of(tmp_path, pairs(), [PAIR | {"label": withheld}] * 3, name="test")
    assert not split.has_labels
    assert [row.label for row in split.rows] == [None] * 3


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.parquet", "train.csv", "train.tsv"])
def test_no_payload_is_run(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    for payload, content in payloads(marker).items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_split(pairs(), "train", path=str(tmp_path))
        assert len(str(caught.value).splitlines()) == 1, payload
        assert not marker.exists(), payload


FILES: dict[str, tuple[str, bytes, str]] = {
    "no rows": ("train.jsonl", b"\n\n", "split train holds no row"),
    "no RACE": ("train/1.txt", b'{"article": "a"}', "is not an article of RACE"),
    "fewer answers": (
        "train/1.txt", b'{"article": "a", "questions": ["q"], "options": [[]], "answers": []}',
        "not as many questions as options",
    ),
    "half of the files": (
        "train-00001-of-00002.jsonl", b'{"first": "a"}\n', "there are 1 of 2 files .*: add the others"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_bad_file_is_named(tmp_path: Path, case: str) -> None:
    name, content, message = FILES[case]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_split(pairs(), "train", path=str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_missing_split_is_reported(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match=r"data\.path=.*train\.jsonl"):
        read_split(pairs(), "train", path=str(tmp_path / path))
