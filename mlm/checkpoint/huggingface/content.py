"""What of a model a folder of `transformers` holds, told by the names of its tensors.

`architectures` of config.json names a class, but folders are saved from other classes, and cut down by hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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


def labels(model: ModelConfig, known: Sequence[str] = ()) -> dict[str, JSON]:
    """Labels as config.json has them: their names, or transformers' own where they are not known."""
    names = [f"LABEL_{n}" for n in range(model.num_labels)]
    if len(set(known)) == model.num_labels:
        names = list(known)
    return {
        "id2label": {str(n): name for n, name in enumerate(names)},
        "label2id": {name: n for n, name in enumerate(names)},
    }
