"""Files of predictions: GLUE's and SQuAD's in the form their pages take, RACE's as JSON by question."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlm.config.downstream_schema import TaskConfig
from mlm.files import write_atomic
from mlm.ownership import claim_folder
from mlm.tasks.finetune.answers import Prediction
from mlm.tasks.finetune.rows import Split


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
    stem = dict(zip(task.tests, task.submission, strict=False)).get(split.name, split.name)
    claim_folder(folder, "predictions", key="predictions")
    if task.kind in ("classification", "regression"):
        return [write(folder / f"{stem}.tsv", table(task, predictions))]
    files = [write(folder / f"{stem}.json", as_json({p.id: written(task, p) for p in predictions}))]
    if task.kind == "span":
        n_best = {p.id: [{"text": c.text, "score": c.score} for c in p.n_best] for p in predictions}
        files.append(write(folder / f"{stem}-n-best.json", as_json(n_best)))
        if task.unanswerable:
            files.append(write(folder / f"{stem}-null.json", as_json({p.id: excess(p) for p in predictions})))
    return files


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


def excess(prediction: Prediction) -> float:
    """How much the score of no answer exceeds the best answer's: SQuAD 2.0's script seeks its threshold."""
    best = prediction.n_best[0].score if prediction.n_best else 0.0
    return (prediction.null_score or 0.0) - best


def as_json(content: Any) -> str:
    """JSON, one entry a line."""
    return json.dumps(content, ensure_ascii=False, indent=0) + "\n"


def write(path: Path, content: str) -> Path:
    """Write a text whole or not at all. Raises OSError."""
    write_atomic(path, content.encode())
    return path
