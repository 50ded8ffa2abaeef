"""What of a model a folder of `transformers` holds, told by the names of its tensors.

`architectures` of config.json names a class, but folders are saved from other classes, and cut down by hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlm.checkpoint.huggingface.keys import show
from mlm.checkpoint.native.format import JSON
from mlm.errors import UserError
from mlm.models.config import ModelConfig

Head = Literal["language_model", "none", "classification", "span"]
"""As in ModelConfig."""


@dataclass(frozen=True)
class Ids:
    """Token ids that a config.json tells."""

    eod: int | None = None
    """End of document."""
    pad: int | None = None
    labels: tuple[str, ...] = ()
    """Names of the labels by number, where they are known."""


@dataclass(frozen=True)
class Content:
    """What is made of a folder's tensors."""

    config: ModelConfig
    """With the head that is there."""
    filled: frozenset[str] = frozenset()
    """Parameters of ours that are not there: they take initial values."""
    left_out: frozenset[str] = frozenset()
    """Tensors that are there, by their names, and have no place in our model."""
    notes: tuple[str, ...] = ()
    """What to tell about both."""


def one_head(heads: Mapping[Head, str], found: Mapping[str, object], path: str) -> Head | None:
    """The head whose tensor is there; `heads`: our word for it -> a tensor that only it has.

    Raises UserError for two.
    """
    there = [(head, theirs) for head, theirs in heads.items() if theirs in found]
    if len(there) > 1:
        names = " and ".join(theirs for _, theirs in there)
        raise UserError(f"{path}: holds {names}, of two heads. Save the model with one")
    return there[0][0] if there else None


def told_ids(said: Mapping[str, JSON], model: ModelConfig) -> tuple[Ids, tuple[str, ...]]:
    """The padding and the names of labels in a config.json that a later export can write again, and a note on
    each of the two that is there and not kept. Names that transformers itself gives are none."""
    notes = []
    pad, size = said.get("pad_token_id"), model.vocab_size
    if pad is not None and (isinstance(pad, bool) or not isinstance(pad, int) or not 0 <= pad < size):
        notes.append(f"pad_token_id={show(pad)} is not kept: the model reads ids from 0 to {size - 1}")
        pad = None
    names: tuple[str, ...] = ()
    by_number = said.get("id2label")
    if by_number and not is_unnamed(by_number):
        if model.head != "classification":
            notes.append("id2label is not kept: there is no classifier that it could name the labels of")
        elif not (names := names_of(by_number, model.num_labels)):
            notes.append(f"id2label is not kept: it does not give {model.num_labels} labels a name each")
    return Ids(pad=pad, labels=names), tuple(notes)


def is_unnamed(by_number: JSON) -> bool:
    """Whether all names of an id2label are transformers' own."""
    return isinstance(by_number, dict) and all(name == f"LABEL_{n}" for n, name in by_number.items())


def names_of(by_number: JSON, count: int) -> tuple[str, ...]:
    """The names of an id2label in the order of their numbers; none where it does not tell `count`."""
    if not isinstance(by_number, dict) or by_number.keys() != {str(n) for n in range(count)}:
        return ()
    names = [name for n in range(count) if isinstance(name := by_number[str(n)], str)]
    return tuple(names) if len(set(names)) == count else ()


def labels(model: ModelConfig, known: Sequence[str] = ()) -> dict[str, JSON]:
    """Labels as config.json has them: their names, or transformers' own where they are not known."""
    names = [f"LABEL_{n}" for n in range(model.num_labels)]
    if len(set(known)) == model.num_labels:
        names = list(known)
    return {
        "id2label": {str(n): name for n, name in enumerate(names)},
        "label2id": {name: n for n, name in enumerate(names)},
    }
