"""The model that a configuration describes."""

from mlm.models.bert.model import BERT
from mlm.models.gpt2.model import GPT2

Model = GPT2 | BERT

MODELS: dict[str, type[GPT2] | type[BERT]] = {"gpt2": GPT2, "bert": BERT}
"""By model.kind; their constructors are that of Transformer."""
