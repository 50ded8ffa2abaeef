"""BERT as a model family."""

from mlm.models.bert.model import BERT
from mlm.models.family import ModelFamily

FAMILY = ModelFamily(model=BERT, causal=False)
