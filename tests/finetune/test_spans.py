"""Windows over a context equal those of transformers' tokenizers, and answers are found where they are."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.finetune.span import SPAN, Window
from mlm.finetune.splits import tokenize
from tests.finetune.material import bert, gpt2, sentence, shipped, split_of, their_bert

SMALL = {"max_length": 40, "doc_stride": 9, "question_length": 8, "max_answer_length": 5, "n_best": 6}


def question_row(draw: random.Random, number: int, words: int) -> dict[str, Any]:
    context = sentence(draw, words)
    pieces = context.split(" ")
    begin = draw.randrange(len(pieces))
    answer = " ".join(pieces[begin : begin + draw.randint(1, 4)])
    start = len(" ".join(pieces[:begin])) + (begin > 0)
    return {
        "id": f"q{number}",
        "context": context,
        "question": sentence(draw, 3),
        "answers": {"text": [answer], "answer_start": [start]},
    }


def question_rows(count: int = 30) -> list[dict[str, Any]]:
    draw = random.Random(3)
    return [question_row(draw, n, draw.randint(2, 60)) for n in range(count)]


def windows_of(
    folder: Path, rows: list[dict[str, Any]], name: str = "squad", *, causal: bool = False, **changes: Any
) -> tuple[Any, Any, list[Window]]:
    task = shipped(name, **SMALL | changes)
    split = split_of(folder, task, rows)
    tokenizer = gpt2() if causal else bert()
    examples = tokenize(task, split, tokenizer, causal=causal, max_length=task.max_length).examples
    return task, split, [example for example in examples if isinstance(example, Window)]


def test_windows_are_those_of_transformers(tmp_path: Path) -> None:
    rows = question_rows()
    _, _, windows = windows_of(tmp_path, rows)
    asked, contexts = ([row[key] for row in rows] for key in ("question", "context"))
    overflow = {"stride": 9, "return_overflowing_tokens": True, "return_offsets_mapping": True}
    theirs = their_bert()(asked, contexts, truncation="only_second", max_length=40, **overflow)
    assert [window.row for window in windows] == theirs["overflow_to_sample_mapping"]
    assert len(windows) > len(rows)
    for number, window in enumerate(windows):
        assert window.texts[0].tokens.tolist() == theirs["input_ids"][number]
        assert window.texts[0].second == window.first
        of_context = [n == 1 for n in theirs.sequence_ids(number)]
        offsets = np.array(theirs["offset_mapping"][number])[of_context]
        assert window.offsets.tolist() == offsets.tolist()
        assert of_context.index(True) == window.first


@pytest.mark.parametrize("causal", [False, True])
def test_labels_are_the_answers_tokens_in_every_window_that_holds_it(tmp_path: Path, causal: bool) -> None:
    rows = question_rows()
    _, _, windows = windows_of(tmp_path, rows, causal=causal)
    found = set[int]()
    for window in windows:
        row, (begin, end) = rows[window.row], window.label  # type: ignore[misc]
        text, start = row["answers"]["text"][0], row["answers"]["answer_start"][0]
        inside = window.offsets[0, 0] <= start and start + len(text) <= window.offsets[-1, 1]
        if inside:
            letters = row["context"][
                window.offsets[begin - window.first, 0] : window.offsets[end - window.first, 1]
            ]
            assert letters.strip() == text
            found.add(window.row)
        else:
            assert begin == end == window.null
    tokenizer = gpt2() if causal else bert()
    # an answer of more tokens than windows share may be in none of them
    assert found >= {
        n for n, row in enumerate(rows) if len(tokenizer.encode(" " + row["answers"]["text"][0])) <= 9
    }
    assert len(found) > 25


def test_question_is_cut_to_its_length(tmp_path: Path) -> None:
    (row,) = question_rows(1)
    row["question"] = "who saw the old cat near the river when it sat on a stone ?"
    task, split, windows = windows_of(tmp_path, [row])
    asked = their_bert()(row["question"], add_special_tokens=False)["input_ids"]
    assert windows[0].texts[0].tokens.tolist()[1:10] == [*asked[:8], bert().sep_id]
    assert tokenize(task, split, bert(), causal=False, max_length=40).truncated == 1


def brute_force(task: Any, windows: list[Window], outputs: list[Any], context: str) -> str:
    best = ("", -np.inf)
    for window, scores in zip(windows, outputs, strict=True):
        for i, (begin, _) in enumerate(window.offsets):
            for j, (_, end) in enumerate(window.offsets):
                score = float(scores[window.first + i, 0]) + float(scores[window.first + j, 1])
                if 0 <= j - i < task.max_answer_length and score > best[1]:
                    best = (context[begin:end], score)
    return best[0]


def test_best_answer_is_that_of_trying_all_pairs(tmp_path: Path) -> None:
    rows = question_rows(12)
    task, split, windows = windows_of(tmp_path, rows)
    draw = np.random.default_rng(5)
    for number, row in enumerate(split.rows):
        mine = [window for window in windows if window.row == number]
        outputs = [draw.normal(size=(len(w.texts[0]), 2)).astype(np.float32) for w in mine]
        wide = task.__class__(**{f: getattr(task, f) for f in task.__slots__} | {"n_best": 100})
        found = SPAN.predict(wide, row, mine, outputs)
        assert found.value == brute_force(task, mine, outputs, row.texts[0])


def test_pairs_that_end_before_they_begin_take_no_place_among_the_best(tmp_path: Path) -> None:
    (row,) = question_rows(1)
    row["context"] = "the cat sat on the old mat"
    row["answers"] = {"text": ["the cat"], "answer_start": [0]}
    task, split, (window,) = windows_of(tmp_path, [row], n_best=2)
    scores = np.zeros((len(window.texts[0]), 2), dtype=np.float32)
    scores[window.first + np.array([5, 1]), 0] = 10, 1
    scores[window.first + np.array([2, 6]), 1] = 10, 1
    found = SPAN.predict(task, split.rows[0], [window], [scores])
    assert found.value == "cat sat"


@pytest.mark.parametrize(
    ("least", "threshold", "is_answered"),
    [(1, 0, False), (1, 2.5, True), (-3, -6.5, False), (-3, -5.5, True)],
)
def test_no_answer_is_given_when_its_least_score_exceeds_the_best_by_the_threshold(
    tmp_path: Path, least: float, threshold: float, is_answered: bool
) -> None:
    """The least of the windows: no answer has twice that score, the best answer 0."""
    row = question_row(random.Random(1), 0, 60)
    task, split, windows = windows_of(tmp_path, [row], "squad_v2", null_threshold=float(threshold))
    assert len(windows) > 1
    outputs = [np.zeros((len(w.texts[0]), 2), dtype=np.float32) for w in windows]
    for output in outputs:
        output[0] = max(least, 0)
    outputs[1][0] = least
    assert (SPAN.predict(task, split.rows[0], windows, outputs).value != "") == is_answered
