"""GPT-2's objective: the next token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.documents import Boundaries, Documents
from mlm.models.gpt2.model import GPT2
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.labels import IGNORE_INDEX
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.transfer import to_device


class NextToken:
    """Cross-entropy of each token given those before it, in nats.

    `boundaries` selects what restarts at each document of a sample (attention, positions); None for nothing.
    """

    parts: tuple[str, ...] = ("loss",)
    losses = 1
    methods: tuple[str, ...] = ("losses", "next_logits")

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype, boundaries: Boundaries | None) -> None:
        self.ctx, self.dtype, self.boundaries = ctx, dtype, boundaries

    @classmethod
    def of(cls, data: DataConfig, ctx: ParallelContext, dtype: torch.dtype) -> "NextToken":
        """The objective of a run; `dtype` is that of activations."""
        return cls(ctx, dtype, Boundaries.of(data))

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Documents | None]:
        """Tokens and labels of a micro-batch, on the device, and the documents to keep apart in it."""
        tokens = to_device(batch.tokens, self.ctx.device)
        labels = to_device(batch.labels, self.ctx.device)
        if self.boundaries is None:
            return tokens, labels, None
        documents = self.boundaries.documents(tokens, self.dtype, batch.tokens)
        return tokens, self.boundaries.scored(tokens, labels), documents

    def counts(self, batch: Batch) -> Sequence[int]:
        """Scored tokens."""
        labels = batch.labels
        if self.boundaries is not None:
            labels = self.boundaries.scored(batch.tokens, labels)
        return (int((labels != IGNORE_INDEX).sum()),)

    def output(
        self, chunk: GPT2, batch: Batch, scale: Tensor, stream: DropoutStream | None, x: Tensor | None
    ) -> Tensor:
        """Hidden states, or in the last stage scale * the summed loss of this cp rank's tokens, [1]."""
        tokens, labels, documents = self.inputs(batch)
        y: Tensor = chunk(tokens, labels, scale[0], stream, x, documents)
        return y.unsqueeze(0) if chunk.stage.is_last else y

    def sums(self, chunk: GPT2, batch: Batch, x: Tensor | None) -> Tensor:
        """Hidden states, or in the last stage the summed loss of this cp rank's tokens, [1] float64."""
        tokens, labels, documents = self.inputs(batch)
        y = chunk.losses(tokens, labels, x, documents)
        return y.sum(dtype=torch.float64).unsqueeze(0) if chunk.stage.is_last else y
