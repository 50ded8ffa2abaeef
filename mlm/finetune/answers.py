"""What a model's outputs say of a row: a label, a number, an option, or words of a context."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlm.finetune.making import Example
from mlm.finetune.parsing import Row
from mlm.finetune.spans import Window
from mlm.finetune.task_config import TaskConfig

Output = NDArray[np.float32]
"""Of one example: [labels], [1], [options], or [n, 2] scores of n tokens to begin and end the answer."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Words that may be the answer."""

    text: str
    score: float
    """Sum of the scores of its first token to begin, and of its last to end, the answer."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of a row."""

    id: str
    """Of the row."""
    value: int | float | str
    """Index of a label or option, a number, or the answer, empty for none."""
    scores: tuple[float, ...] = ()
    """The model's output of each label or option."""
    n_best: tuple[Candidate, ...] = ()
    """Kind span: the best answers, without the one of no answer."""
    null_score: float | None = None
    """Kind span: the score of no answer, the least over the windows."""


def decode_label(
    task: TaskConfig, row: Row, examples: Sequence[Example], outputs: Sequence[Output]
) -> Prediction:
    """The label with the largest score; the first of equals."""
    (scores,) = outputs
    return Prediction(row.id, int(scores.argmax()), tuple(scores.tolist()))


decode_choice = decode_label  # the options are the labels


def decode_number(
    task: TaskConfig, row: Row, examples: Sequence[Example], outputs: Sequence[Output]
) -> Prediction:
    """The output itself, also where it is outside task.label_range."""
    (scores,) = outputs
    return Prediction(row.id, float(scores[0]))


def decode_spans(
    task: TaskConfig, row: Row, examples: Sequence[Example], outputs: Sequence[Output]
) -> Prediction:
    """The best answer over all windows, or none when a question may have none and its score says so.

    As SQuAD's baselines do (arXiv:1810.04805, sections 4.2 and 4.3).
    """
    found = list[tuple[float, int, int]]()  # score, first letter, letter behind the last
    null_score = np.inf
    for window, output in zip(examples, outputs, strict=True):
        assert isinstance(window, Window)
        null_score = min(null_score, float(output[window.null].astype(np.float64).sum()))
        found += window_candidates(task, window, output)
    found.sort(key=lambda candidate: (-candidate[0], *candidate[1:]))
    context = row.texts[0]
    best: dict[str, float] = {}
    for score, begin, end in found:
        text = context[begin:end].strip()  # GPT-2's tokens begin with a space
        if text and text not in best:
            best[text] = score
        if len(best) == task.n_best:
            break
    candidates = tuple(Candidate(text, score) for text, score in best.items())
    answer = candidates[0].text if candidates else ""
    if task.unanswerable and candidates and null_score - candidates[0].score > task.null_threshold:
        answer = ""
    return Prediction(row.id, answer, n_best=candidates, null_score=null_score)


def window_candidates(task: TaskConfig, window: Window, output: Output) -> list[tuple[float, int, int]]:
    """The best answers in one window: score, first letter, letter behind the last."""
    count = len(window.offsets)
    scores = output[window.first : window.first + count].astype(np.float64)  # [count, 2]
    top = np.argsort(-scores, axis=0, kind="stable")[: task.n_best]
    begins, ends = np.meshgrid(top[:, 0], top[:, 1], indexing="ij")
    allowed = (ends >= begins) & (ends - begins < task.max_answer_length)
    begins, ends = begins[allowed], ends[allowed]
    sums = scores[begins, 0] + scores[ends, 1]
    order = np.argsort(-sums, kind="stable")[: task.n_best]
    return [
        (float(sums[n]), int(window.offsets[begins[n], 0]), int(window.offsets[ends[n], 1])) for n in order
    ]
