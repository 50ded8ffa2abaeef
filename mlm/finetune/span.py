"""Span: words of a context that answer a question, if any, as SQuAD."""

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlm.data.tokenizer import Tokenizer
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import BATCH, Example, Frame, encode
from mlm.finetune.metrics import EXTRA
from mlm.finetune.rows import RowError, TaskRow, as_list, check_text, parse_whole_number, quote, read_texts
from mlm.finetune.task_type import Output, Prediction, RowExamples, TaskType
from mlm.inference.scoring import mean_stderr
from mlm.parallel.config import IGNORE_INDEX
from mlm.util.errors import Problem, type_of
from mlm.util.extras import load_extra

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "torchmetrics.functional.text"


class Answer(NamedTuple):
    """An answer to a question in its context."""

    text: str
    start: int
    """Characters before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Window(Example):
    """A question and a part of its context, in one text."""

    first: int
    """Index of the first token of the context in the text."""
    offsets: NDArray[np.int32]
    """[n, 2] first character and end, in the context, of its n tokens in this window."""
    null: int
    """Index of the token that represents no answer: [CLS], or GPT-2's last token, which attends to all."""


class SpanTask(TaskType):
    """The words of a context that answer a question: SQuAD 1.1, and 2.0 with task.unanswerable."""

    head: Literal["classification", "span"] = "span"
    columns = ((2,), "the columns of context and question")
    modules = (MODULE,)
    metric_names = ("f1", "exact_match", "has_answer_f1", "has_answer_exact_match", "no_answer_f1")

    def num_labels(self, task: TaskConfig) -> int:
        return 0

    def row_id(self, task: TaskConfig, name: str, earlier: int) -> str:
        if earlier:
            raise RowError(f"{task.id}={quote(name)} is another row's too: change or delete it")
        return name

    def least_room(self, task: TaskConfig) -> int:
        return task.doc_stride + 2

    def problems(self, task: TaskConfig) -> list[Problem]:
        problems = super().problems(task)
        if task.doc_stride >= task.max_length // 2:
            problem = f"task.doc_stride={task.doc_stride} must be less than half of "
            problem += f"task.max_length={task.max_length}, so that windows advance"
            problems.append(Problem(("task.doc_stride", "task.max_length"), problem))
        return problems

    def metric_problem(self, task: TaskConfig, name: str) -> Problem | None:
        if name in ("f1", "exact_match") or task.unanswerable:
            return None
        keys = ("task.metrics", "task.unanswerable")
        return Problem(keys, f"task.metrics: {name} needs task.unanswerable=true")

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> TaskRow:
        """Return a row of a context, a question, and answers that the context holds. Raises RowError."""
        texts = read_texts(task, record, task.columns)
        answers = answers_of(task, record.get(task.label))
        if answers == () and not task.unanswerable:
            if record.get("is_impossible"):
                fix = "use task=squad_v2, or set task.unanswerable=true"
                raise RowError(f"has no answer, as in SQuAD 2.0: {fix}")
            answers = None
        for answer in answers or ():
            words = texts[0][answer.start : answer.start + len(answer.text)]
            if answer.start < 0 or words != answer.text or not answer.text:
                raise RowError(
                    f"answer_start={answer.start} of '{task.label}' is not where {quote(answer.text)} is: "
                    f"the context has {quote(words)} there: fix or delete it"
                )
        return TaskRow(id, texts, answers)

    def make_examples(
        self, task: TaskConfig, rows: Sequence[TaskRow], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[RowExamples]:
        """Yield one example per window: [CLS] question [SEP] part of the context [SEP].

        Neighbouring windows share task.doc_stride tokens of the context, as with transformers' tokenizers
        (return_overflowing_tokens). A window without the answer is labelled as unanswerable.
        """
        longest = (frame.room(2) - task.doc_stride) // 2  # windows then advance by more than a token
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            questions = encode((row.texts[1] for row in batch), tokenizer)
            distinct = list(dict.fromkeys(row.texts[0] for row in batch))
            contexts = dict(zip(distinct, tokenizer.encode_with_offsets(distinct), strict=True))
            for number, (row, question) in enumerate(zip(batch, questions, strict=True), start):
                full_length = len(question)
                question = question[: task.question_length][:longest]
                ids, offsets = contexts[row.texts[0]]
                size = frame.room(2) - len(question)
                windows = list[Example]()
                for begin in range(0, max(1, len(ids) - task.doc_stride), size - task.doc_stride):
                    part = slice(begin, begin + size)
                    text = frame.two(question, ids[part])
                    null = len(text) - 1 if frame.causal else 0
                    first = len(frame.begin) + len(question) + len(frame.between)
                    label = span_label(row.label, offsets[part], first, null)
                    windows.append(Window(number, (text,), label, first, offsets[part], null))
                yield windows, len(question) < full_length

    def loss(self, outputs: "Tensor", labels: "Tensor", lengths: "Tensor") -> "Tensor":
        """Return the mean of the losses of an answer's first and last token, summed (arXiv:1810.04805, 4.2).

        outputs [E, S, 2], labels [E, 2].
        """
        import torch  # late: checks of a task need none
        import torch.nn.functional as F

        is_padding = torch.arange(outputs.shape[1], device=outputs.device) >= lengths[:, None]
        outputs = outputs.masked_fill(is_padding.unsqueeze(-1), torch.finfo(outputs.dtype).min)
        first, last = (
            F.cross_entropy(outputs[..., i], labels[:, i], ignore_index=IGNORE_INDEX, reduction="sum")
            for i in (0, 1)
        )
        return (first + last) / 2

    def predict(
        self, task: TaskConfig, row: TaskRow, examples: Sequence[Example], outputs: Sequence[Output]
    ) -> Prediction:
        """Return the best answer over all windows, or by task.null_threshold no answer.

        As SQuAD's baselines do (arXiv:1810.04805, sections 4.2 and 4.3).
        """
        spans = list[tuple[float, int, int]]()  # score, first character, end
        null_score = np.inf
        for window, output in zip(examples, outputs, strict=True):
            assert isinstance(window, Window)
            null_score = min(null_score, float(output[window.null].astype(np.float64).sum()))
            spans += window_candidates(task, window, output)
        for score, begin, end in sorted(spans, key=lambda span: (-span[0], *span[1:])):
            if text := row.texts[0][begin:end].strip():  # GPT-2's tokens begin with a space
                has_none = task.unanswerable and null_score - score > task.null_threshold
                return Prediction(row.id, "" if has_none else text)
        return Prediction(row.id, "")

    def score(
        self, task: TaskConfig, rows: Sequence[TaskRow], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        scores = scores_by_question(task, rows, predictions)
        return {name: float(scores[name].mean()) for name in task.metrics if scores[name].size}

    def standard_errors(
        self, task: TaskConfig, rows: Sequence[TaskRow], predictions: Sequence[Prediction]
    ) -> dict[str, float | None]:
        scores = scores_by_question(task, rows, predictions)
        return {name: mean_stderr(scores[name].tolist()) for name in task.metrics}


def answers_of(task: TaskConfig, value: Any) -> tuple[Answer, ...] | None:
    """Return the answers of a record; None if it is unlabelled. Raises RowError.

    In the Hub's form, {text: [...], answer_start: [...]}, or in SQuAD's, a list of {text, answer_start}.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        texts, starts = as_list(value.get("text")), as_list(value.get("answer_start"))
        if texts is None or starts is None or len(texts) != len(starts):
            raise RowError(f"'{task.label}' has not as many text as answer_start: fix or delete it")
        pairs = list(zip(texts, starts, strict=True))
    else:
        items = as_list(value)
        if items is None or not all(isinstance(item, Mapping) for item in items):
            raise RowError(
                f"'{task.label}' holds {type_of(value)}, not text and answer_start: fix or delete it"
            )
        pairs = [(item.get("text"), item.get("answer_start")) for item in items]
    answers = list[Answer]()
    for text, start in pairs:
        number = parse_whole_number(start)
        if number is None:
            raise RowError(
                f"answer_start={quote(start)} of '{task.label}' is not a whole number: fix or delete it"
            )
        answers.append(Answer(check_text(text, task.label), number))
    return tuple(answers)


def span_label(
    answers: Sequence[Answer] | None, offsets: NDArray[np.int32], first: int, null: int
) -> tuple[int, int] | None:
    """Return the first and last token of the first answer in a window; `null` twice if it is not inside."""
    if answers is None:
        return None
    if not answers or not len(offsets):
        return null, null
    answer = answers[0]
    end = answer.start + len(answer.text)
    if answer.start < offsets[0, 0] or end > offsets[-1, 1]:
        return null, null
    begins = int(np.searchsorted(offsets[:, 0], answer.start, side="right")) - 1
    ends = int(np.searchsorted(offsets[:, 1], end, side="left"))
    return first + begins, first + ends


def window_candidates(task: TaskConfig, window: Window, output: Output) -> list[tuple[float, int, int]]:
    """Return the best answers in one window: score, first character, end."""
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


def scores_by_question(
    task: TaskConfig, rows: Sequence[TaskRow], predictions: Sequence[Prediction]
) -> dict[str, NDArray[np.float64]]:
    """Return for each metric the scores of its questions, over each question's answers the best.

    The answer of an unanswerable question is the empty text (arXiv:1806.03822): F1 and exact match are 1 for
    no answer, else 0.
    """
    scores, answerable = list[tuple[float, float]](), list[bool]()
    for row, prediction in zip(rows, predictions, strict=True):
        texts = [answer.text for answer in row.label]
        scores.append(score_span(task, texts, str(prediction.value)))
        answerable.append(bool(texts))
    f1, exact = np.array(scores).T
    has_answer = np.array(answerable)
    return {
        "f1": f1,
        "exact_match": exact,
        "has_answer_f1": f1[has_answer],
        "has_answer_exact_match": exact[has_answer],
        "no_answer_f1": f1[~has_answer],
    }


def score_span(task: TaskConfig, texts: Sequence[str], value: str) -> tuple[float, float]:
    """Return (F1, exact match) of one answer, also for texts without a word that counts, such as "The!".

    For such an answer SQuAD 1.1's evaluate-v1.1.py gives F1 = 0. SQuAD 2.0's evaluate-v2.0.py leaves out such
    reference answers; without a further one, no answer is right.
    """
    squad = load_extra(MODULE, "task.kind=span", EXTRA).squad
    if task.unanswerable:
        texts = [text for text in texts if normalize_answer(text)]
    # one question at a time: torchmetrics sums scores in float32
    result = squad(
        [{"id": "", "prediction_text": value}], [{"id": "", "answers": {"text": list(texts) or [""]}}]
    )
    f1, exact = float(result["f1"]) / 100, float(result["exact_match"]) / 100
    return (f1 if task.unanswerable or normalize_answer(value) else 0.0), exact


def normalize_answer(text: str) -> str:
    letters = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


SPAN = SpanTask()
