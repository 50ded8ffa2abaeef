"""Random samples on which a model is compared with another library's.

Shapes: B samples, S tokens, R tokens that are no padding, V vocabulary, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mlm.models.config import ModelConfig
from mlm.models.family import family_of

BATCH, LENGTH = 2, 64
SEED = 0

Outputs = dict[str, Tensor]
"""Outputs of a model by name: of each token [R, …], of each sample [B, …]."""


@dataclass(frozen=True, eq=False)
class Probe:
    """Samples of random tokens, the same at every call for models of the same shape."""

    tokens: Tensor
    """[B, S] int64, over the whole vocabulary."""
    lengths: Tensor
    """[B] int64: tokens before the padding. The last sample is shorter, but for a causal language model."""
    token_types: Tensor | None
    """[B, S] int64; None for a model without token types."""

    @classmethod
    def of(cls, model: ModelConfig) -> "Probe":
        """Samples for a model."""
        generator = torch.Generator().manual_seed(SEED)
        shape = (BATCH, min(model.max_positions, LENGTH))
        tokens = torch.randint(model.vocab_size, shape, generator=generator)
        lengths = torch.full((BATCH,), shape[1])
        if not family_of(model.kind).causal or model.head == "classification":
            lengths[-1] -= shape[1] // 3
        types = torch.randint(model.token_types, shape, generator=generator) if model.token_types else None
        return cls(tokens, lengths, types)

    @property
    def mask(self) -> Tensor:
        """[B, S] bool: True for tokens that are no padding."""
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]
