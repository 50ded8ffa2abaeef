"""What a kind of task does at each step. With a YAML (TaskConfig), this is all that a task is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlm.data.tokenizer import Tokenizer
from mlm.finetune.answers import (
    Output,
    Prediction,
    decode_choice,
    decode_label,
    decode_number,
    decode_spans,
)
from mlm.finetune.making import Example, Made, make_choices, make_pairs
from mlm.finetune.parsing import Row, parse_choice, parse_classification, parse_regression, parse_span
from mlm.finetune.spans import make_windows
from mlm.finetune.task_config import TaskConfig
from mlm.finetune.tokens import Frame


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The steps from a record to a prediction."""

    parse: Callable[[TaskConfig, Mapping[str, Any], str], Row]
    """A checked row of a record and its id; raises RowError."""
    make: Callable[[TaskConfig, Sequence[Row], Tokenizer, Frame], Iterator[Made]]
    """The examples of each row."""
    decode: Callable[[TaskConfig, Row, Sequence[Example], Sequence[Output]], Prediction]
    """What the outputs for the examples of a row say."""
    num_labels: Callable[[TaskConfig], int]
    """Outputs per text of head=classification; 0 for head=span."""
    least_room: Callable[[TaskConfig], int] = lambda task: 2
    """Tokens that texts must be given beside the special ones."""

    @property
    def head(self) -> Literal["classification", "span"]:
        """The head of the model (ModelConfig.head)."""
        return "span" if self.decode is decode_spans else "classification"


KINDS: dict[str, Kind] = {
    "classification": Kind(
        parse=parse_classification,
        make=make_pairs,
        decode=decode_label,
        num_labels=lambda task: len(task.labels),
    ),
    "regression": Kind(
        parse=parse_regression, make=make_pairs, decode=decode_number, num_labels=lambda task: 1
    ),
    "choice": Kind(parse=parse_choice, make=make_choices, decode=decode_choice, num_labels=lambda task: 1),
    "span": Kind(
        parse=parse_span,
        make=make_windows,
        decode=decode_spans,
        num_labels=lambda task: 0,
        least_room=lambda task: task.doc_stride + 2,
    ),
}
