"""Questions on a context: windows that slide over the context, each behind the question."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlm.data.tokenizer import Tokenizer
from mlm.finetune.making import Example, Made
from mlm.finetune.parsing import Answer, Row
from mlm.finetune.task_config import TaskConfig
from mlm.finetune.tokens import BATCH, Frame, encode


@dataclass(frozen=True, slots=True, eq=False)
class Window(Example):
    """A part of a context behind the question; `texts` has one text."""

    first: int
    """Index of the first token of the context in the text."""
    offsets: NDArray[np.int32]
    """[n, 2] letters of the context where its n tokens in this window begin and end."""
    null: int
    """Index of the token that stands for no answer: [CLS], or GPT-2's last token, which has seen all."""


def make_windows(task: TaskConfig, rows: Sequence[Row], tokenizer: Tokenizer, frame: Frame) -> Iterator[Made]:
    """One example per window: [CLS] question [SEP] part of the context [SEP].

    Neighbouring windows share task.doc_stride tokens of the context, as those of transformers' tokenizers do
    (return_overflowing_tokens). A window without the answer is labelled as one of a question without answer.
    """
    longest = (frame.room(2) - task.doc_stride) // 2  # so that windows get on, and by more than a token
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        questions = encode((row.texts[1] for row in batch), tokenizer)
        distinct = list(dict.fromkeys(row.texts[0] for row in batch))
        contexts = dict(zip(distinct, tokenizer.encode_with_offsets(distinct), strict=True))
        for number, (row, question) in enumerate(zip(batch, questions, strict=True), start):
            asked = question[: task.question_length][:longest]
            ids, offsets = contexts[row.texts[0]]
            size = frame.room(2) - len(asked)
            windows = list[Example]()
            for begin in window_starts(len(ids), size, task.doc_stride):
                part = slice(begin, begin + size)
                text = frame.two(asked, ids[part])
                null = 0 if frame.types else len(text) - 1
                first = len(frame.begin) + len(asked) + len(frame.end)
                label = span_label(row.label, offsets[part], first, null)
                windows.append(Window(number, (text,), label, first, offsets[part], null))
            yield windows, len(asked) < len(question)


def window_starts(length: int, size: int, overlap: int) -> list[int]:
    """Where windows of `size` begin that cover `length` tokens and share `overlap` of them; one at least."""
    assert size > overlap
    count = -(-max(0, length - size) // (size - overlap))
    return [n * (size - overlap) for n in range(count + 1)]


def span_label(answers: object, offsets: NDArray[np.int32], first: int, null: int) -> tuple[int, int] | None:
    """First and last token of the first answer in the text of a window; `null` twice if it is not inside."""
    if answers is None:
        return None
    assert isinstance(answers, tuple)
    if not answers or not len(offsets):
        return null, null
    answer = answers[0]
    assert isinstance(answer, Answer)
    end = answer.start + len(answer.text)
    if answer.start < offsets[0, 0] or end > offsets[-1, 1]:
        return null, null
    begins = int(np.searchsorted(offsets[:, 0], answer.start, side="right")) - 1
    ends = int(np.searchsorted(offsets[:, 1], end, side="left"))
    return first + begins, first + ends
