"""Metrics against values worked out by hand, formulas written here, and SQuAD's rules for a text."""

import json
import math
import random
import re
import string
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import mean_absolute_error, mean_squared_error, root_mean_squared_error

from mlm.config.build import from_dict
from mlm.finetune.classification import REGRESSION
from mlm.finetune.registry import check_installed, task_type
from mlm.finetune.results import Progress
from mlm.finetune.span import SPAN, score_span
from mlm.finetune.task_type import Prediction
from mlm.util.errors import UserError
from tests.finetune.material import SQUAD, pairs, sentence, shipped, split_of

LABELS = [1, 1, 1, 1, 0, 0, 0, 1]
VALUES = [1, 1, 0, 1, 1, 0, 0, 1]  # 4 true positives, 1 false, 1 missed, 2 true negatives


def scores(folder: Path, task: Any, labels: list[Any], values: list[Any]) -> dict[str, float]:
    columns = dict.fromkeys(task.columns, "a")
    split = split_of(folder, task, [columns | {"label": label} for label in labels])
    return task_type(task.kind).score(
        task, split.rows, [Prediction(str(n), value) for n, value in enumerate(values)]
    )


@pytest.mark.parametrize(
    "name, value",
    [
        ("accuracy", 6 / 8),
        ("f1", 4 / 5),
        ("accuracy_f1", (6 / 8 + 4 / 5) / 2),
        ("macro_f1", (4 / 5 + 2 / 3) / 2),
        ("matthews", (4 * 2 - 1 * 1) / math.sqrt(5 * 5 * 3 * 3)),
    ],
)
def test_scores_of_labels_are_those_worked_out_by_hand(tmp_path: Path, name: str, value: float) -> None:
    found = scores(tmp_path, pairs(metrics=[name]), LABELS, VALUES)
    assert found == {name: pytest.approx(value, abs=1e-12)}


def numbers() -> tuple[Any, Any]:
    draw = np.random.default_rng(3)
    labels = draw.integers(0, 26, 40) / 5
    return labels, labels + draw.normal(size=40)


def test_errors_of_numbers_are_those_of_scikit_learn(tmp_path: Path) -> None:
    labels, values = numbers()
    theirs = {"mse": mean_squared_error, "rmse": root_mean_squared_error, "mae": mean_absolute_error}
    found = scores(tmp_path, shipped("stsb", metrics=list(theirs)), labels.tolist(), values.tolist())
    want = {name: metric(labels, values) for name, metric in theirs.items()}
    assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("name", "best"), [("rmse", 2), ("pearson", 1)])
def test_the_best_checkpoint_has_the_least_error_or_the_largest_score(name: str, best: int) -> None:
    progress = Progress()
    for step, value in enumerate([0.7, 0.8, 0.2, 0.2], 0):
        progress.add(step, {"validation": {name: value}}, REGRESSION.errors)
    assert progress.best_step == best
    assert progress.without_gain == 3 - best


def test_scores_of_numbers_are_the_formulas(tmp_path: Path) -> None:
    labels, values = numbers()

    def pearson(a: Any, b: Any) -> float:
        return float(((a - a.mean()) * (b - b.mean())).sum() / (len(a) * a.std() * b.std()))

    def ranks(a: Any) -> Any:  # equal values share the mean of their ranks
        return np.array([(a < x).sum() + ((a == x).sum() + 1) / 2 for x in a])

    found = scores(tmp_path, shipped("stsb"), labels.tolist(), values.tolist())
    p, s = pearson(labels, values), pearson(ranks(labels), ranks(values))
    assert list(found) == ["pearson_spearman", "pearson", "spearman"]
    assert list(found.values()) == pytest.approx([(p + s) / 2, p, s], abs=1e-12)


@pytest.mark.parametrize("labels", [[1.0, 2.0, 3.0], [1.0]])
def test_correlation_that_is_not_defined_is_zero(tmp_path: Path, labels: list[float]) -> None:
    assert set(scores(tmp_path, shipped("stsb"), labels, [2.5] * len(labels)).values()) == {0.0}


def normal(text: str) -> str:
    """Lower case, without punctuation, articles and spare white space (arXiv:1606.05250, section 6.1)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def word_f1(answer: str, wanted: str) -> float:
    found, gold = normal(answer).split(), normal(wanted).split()
    if not found or not gold:
        return float(found == gold)
    common = sum((Counter(found) & Counter(gold)).values())
    return 2 * common / (len(found) + len(gold))


def test_spans_are_scored_by_the_best_of_their_answers(tmp_path: Path) -> None:
    draw, rows, values = random.Random(4), [], []
    for number in range(60):
        context = sentence(draw, 12)
        pieces = context.split(" ")
        answers = {"text": [], "answer_start": []}  # type: ignore[var-annotated]
        for _ in range(draw.randint(0, 3)):
            begin = draw.randrange(12)
            answers["text"].append(" ".join(pieces[begin : begin + 3]))
            answers["answer_start"].append(len(" ".join(pieces[:begin])) + (begin > 0))
        rows.append({"id": f"q{number}", "context": context, "question": "who ?", "answers": answers})
        at = draw.randrange(12)
        near = answers["text"][-1] if answers["text"] and draw.random() < 0.4 else ""
        values.append(draw.choice(["", " ".join(pieces[at : at + 2]), near.upper() + " ."]))
    task = shipped("squad_v2")
    split = split_of(tmp_path, task, rows)
    found = task_type(task.kind).score(
        task, split.rows, [Prediction(f"q{n}", value) for n, value in enumerate(values)]
    )

    # as evaluate-v2.0.py: answers of which nothing counts are left out
    gold = [[text for text in row["answers"]["text"] if normal(text)] or [""] for row in rows]
    has_answer = np.array([bool(row["answers"]["text"]) for row in rows])
    f1 = np.array([max(word_f1(v, t) for t in texts) for v, texts in zip(values, gold, strict=True)])
    exact = np.array(
        [max(float(normal(v) == normal(t)) for t in texts) for v, texts in zip(values, gold, strict=True)]
    )
    assert 0 < exact.mean() < f1.mean() < 1
    assert found == {
        "f1": pytest.approx(f1.mean(), abs=1e-6),
        "exact_match": pytest.approx(exact.mean(), abs=1e-6),
        "has_answer_f1": pytest.approx(f1[has_answer].mean(), abs=1e-6),
        "has_answer_exact_match": pytest.approx(exact[has_answer].mean(), abs=1e-6),
        "no_answer_f1": pytest.approx(f1[~has_answer].mean(), abs=1e-6),
    }


@pytest.mark.parametrize("name, module", [("sst2", "sklearn"), ("stsb", "scipy"), ("squad", "torchmetrics")])
def test_missing_package_is_reported_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    for known in [key for key in sys.modules if key.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"task={name} needs the package {module}: .*mlm\[finetune\]"):
        check_installed(shipped(name))


@pytest.mark.parametrize(
    ("name", "right", "value", "f1", "exact"),
    [
        ("squad", "The", "a!", 0.0, 1.0),
        ("squad", "The", "", 0.0, 1.0),
        ("squad_v2", "The", "a!", 1.0, 1.0),
        ("squad_v2", "The", "cat", 0.0, 0.0),
        ("squad_v2", "old cat", "the", 0.0, 0.0),
    ],
)
def test_texts_of_which_nothing_counts_are_scored_as_the_official_scripts_do(
    name: str, right: str, value: str, f1: float, exact: float
) -> None:
    """evaluate-v1.1.py counts common words, of which there are none; evaluate-v2.0.py takes them as empty."""
    assert score_span(shipped(name), [right], value) == (f1, exact)


def test_answers_have_the_standard_errors_of_lm_eval(tmp_path: Path) -> None:
    task, theirs = shipped("squad_v2"), pytest.importorskip("lm_eval.api.metrics").mean_stderr
    none = SQUAD | {"answers": {"text": [], "answer_start": []}}
    split = split_of(tmp_path, task, [row | {"id": f"q{n}"} for n, row in enumerate([SQUAD, SQUAD, none])])
    predictions = [Prediction(f"q{n}", text) for n, text in enumerate(["cat", "", ""])]
    errors = SPAN.standard_errors(task, split.rows, predictions)
    assert errors.pop("no_answer_f1", None) is errors.pop("no_answer_exact_match", None) is None  # of one
    right = theirs([1.0, 0.0, 1.0])
    assert errors.pop("has_answer_f1") == errors.pop("has_answer_exact_match") == theirs([1.0, 0.0])
    assert errors == {"f1": pytest.approx(right), "exact_match": pytest.approx(right)}


def test_a_record_of_validations_keeps_which_metric_decides() -> None:
    """JSON of checkpoints sorts names."""
    progress = Progress()
    progress.add(1, {"validation": {"f1": 0.5, "accuracy": 0.9}})
    read = from_dict(Progress, json.loads(json.dumps(asdict(progress), sort_keys=True)))
    assert read.add(2, {"validation": {"f1": 0.6, "accuracy": 0.1}})
