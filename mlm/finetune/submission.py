"""Files of predictions: GLUE's and SQuAD's in the form their pages take, RACE's as JSON by question."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlm.files.atomic import write_atomic
from mlm.files.ownership import claim_folder
from mlm.finetune.answers import Prediction
from mlm.finetune.metrics import excess
from mlm.finetune.rows import Split
from mlm.finetune.task_config import TaskConfig


def write_predictions(
    task: TaskConfig, split: Split, predictions: Sequence[Prediction], folder: Path
) -> list[Path]:
    """Write the predictions of a split below a folder, and return the files.

    {stem}.tsv of kind classification and regression, as gluebenchmark.com takes it: a line `index` and
    `prediction`, then id and label of each row. {stem}.json of the other kinds: the answer or the name of the
    option by the row's id; of kind span also {stem}-n-best.json, and, when questions may have no answer,
    {stem}-null.json with how much the score of none exceeds the best one's. `stem` is the split's name in
    task.submission, or its own. Raises OSError.
    """
    names = files_of(task, split.name)
    claim_folder(folder, "predictions", key="predictions", writes=names)
    if task.kind in ("classification", "regression"):
        contents = [table(task, predictions)]
    else:
        n_best = {p.id: [{"text": c.text, "score": c.score} for c in p.n_best] for p in predictions}
        nulls = {p.id: excess(p) for p in predictions} if task.unanswerable else {}
        answers = {p.id: written(task, p) for p in predictions}
        contents = [as_json(answers), as_json(n_best), as_json(nulls)]
    return [write(folder / name, content) for name, content in zip(names, contents, strict=False)]


def files_of(task: TaskConfig, split: str) -> list[str]:
    """Names of the files of a split's predictions."""
    stem = dict(zip(task.tests, task.submission, strict=False)).get(split, split)
    if task.kind in ("classification", "regression"):
        return [f"{stem}.tsv"]
    if task.kind != "span":
        return [f"{stem}.json"]
    return [f"{stem}{end}.json" for end in ("", "-n-best", *(("-null",) if task.unanswerable else ()))]


def table(task: TaskConfig, predictions: Sequence[Prediction]) -> str:
    """GLUE's table of predictions."""
    lines = [f"{' '.join(p.id.split())}\t{written(task, p)}" for p in predictions]
    return "\n".join(["index\tprediction", *lines, ""])


def written(task: TaskConfig, prediction: Prediction) -> str:
    """A prediction as it is handed in."""
    value = prediction.value
    if isinstance(value, float):
        low, high = task.label_range or (value, value)
        return f"{min(max(value, low), high):.3f}"
    if isinstance(value, int):
        return task.labels[value] if task.submit_names else str(value)
    return value


def as_json(content: Any) -> str:
    """JSON, one entry a line."""
    return json.dumps(content, ensure_ascii=False, indent=0) + "\n"


def write(path: Path, content: str) -> Path:
    """Write a text whole or not at all. Raises OSError."""
    write_atomic(path, content.encode())
    return path
