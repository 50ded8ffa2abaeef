"""GPT-2 as a model family."""

from mlm.models.family import ModelFamily
from mlm.models.gpt2.model import GPT2

FAMILY = ModelFamily(model=GPT2, causal=True)
