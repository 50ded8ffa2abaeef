"""RoBERTa: a bidirectional transformer, trained to predict masked tokens alone (arXiv:1907.11692).

DistilBERT (arXiv:1910.01108) has no token types, and a ReLU in its pooler.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.models.bert.model import MaskedLanguageModel
from mlm.models.family import option


class RoBERTa(MaskedLanguageModel):
    """RoBERTa with its masked-token head, a finetuning head (`outputs`), or none.

    Pretraining has no pooler: a classifier starts with a new one.
    """

    pooled_heads: ClassVar[tuple[str, ...]] = ("classification",)

    def pool(self, h: Tensor) -> Tensor:
        y = self.pooler(h[:1])
        return F.relu(y) if option(self.config, "pooler_activation") == "relu" else torch.tanh(y)
