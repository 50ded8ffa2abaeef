"""Model families: gpt2/, bert/ and llama/, of one ModelConfig and one backbone.

Imported when first used, as settings need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlm.models.bert.model import BERT
    from mlm.models.config import ModelConfig
    from mlm.models.family import ModelFamily
    from mlm.models.gpt2.model import GPT2

__all__ = ["BERT", "GPT2", "ModelConfig", "ModelFamily"]

_MODULES = {"BERT": "bert.model", "GPT2": "gpt2.model", "ModelConfig": "config", "ModelFamily": "family"}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
