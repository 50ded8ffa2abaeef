"""Model families: one object says all that the rest of the toolkit knows of one.

`model.kind` names a shipped family (gpt2, bert), or one of the user's own by its import path,
`my_package.my_module:FAMILY`.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlm.models.backbone import Transformer

SHIPPED = {"gpt2": "mlm.models.gpt2.family:FAMILY", "bert": "mlm.models.bert.family:FAMILY"}


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A model family."""

    model: "type[Transformer]"
    """Module of one pipeline stage, or of the whole model."""
    causal: bool
    """True if a token attends only to itself and to the tokens before it: such a model generates text."""


def family_of(kind: str) -> ModelFamily:
    """Return the family that `model.kind` names. Raises ValueError if there is none."""
    path = SHIPPED.get(kind, kind)
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"model.kind={kind}: no such family; use {', '.join(SHIPPED)} or module:NAME")
    family = getattr(import_module(module), name)
    if not isinstance(family, ModelFamily):
        raise ValueError(f"model.kind={kind}: {name} is not a ModelFamily")
    return family
