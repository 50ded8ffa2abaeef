"""BERT's objective: masked tokens, and the order of two segments."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.models.backbone import Inputs
from mlm.models.bert.model import BERT, PARTS, MaskedTargets, masked_targets
from mlm.models.bert.samples import BERTBatch
from mlm.models.documents import padding_spans
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.labels import IGNORE_INDEX
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.transfer import to_device


class MaskedTokens:
    """Cross-entropy of masked tokens and of the order of the segments (`PARTS`)."""

    parts: tuple[str, ...] = PARTS
    losses = 2
    methods: tuple[str, ...] = ("sums",)

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype) -> None:
        self.ctx, self.dtype = ctx, dtype

    @classmethod
    def of(cls, data: DataConfig, ctx: ParallelContext, dtype: torch.dtype) -> "MaskedTokens":
        """The objective of a run; `dtype` is that of activations."""
        return cls(ctx, dtype)

    def inputs(self, chunk: BERT, batch: BERTBatch) -> tuple[Inputs, MaskedTargets]:
        """Inputs and targets of a micro-batch, on the device."""
        device = self.ctx.device
        spans = padding_spans(batch.lengths, batch.tokens.shape[1], self.dtype, device)
        shard = {"parts": self.ctx.tp.size, "part": self.ctx.tp.rank} if chunk.sequence_parallel else {}
        targets = masked_targets(batch.labels, batch.is_swapped, **shard)
        places, labels, is_swapped = (
            to_device(t, device) for t in (targets.places, targets.labels, targets.is_swapped)
        )
        tokens, lengths, token_types = (
            to_device(t, device) for t in (batch.tokens, batch.lengths, batch.token_types)
        )
        return Inputs(tokens, lengths, token_types, spans), MaskedTargets(places, labels, is_swapped)

    def counts(self, batch: BERTBatch) -> Sequence[int]:
        """Masked tokens and samples, for the losses and for the accuracies."""
        masked = int((batch.labels != IGNORE_INDEX).sum())
        samples = int((batch.is_swapped != IGNORE_INDEX).sum())
        return masked, samples, masked, samples

    def output(
        self, chunk: BERT, batch: BERTBatch, scale: Tensor, stream: DropoutStream | None, x: Tensor | None
    ) -> Tensor:
        """Hidden states, or in the last stage scale * the sum of each part, [4]."""
        inputs, targets = self.inputs(chunk, batch)
        y: Tensor = chunk(inputs, targets, scale, stream, x)
        return y

    def sums(self, chunk: BERT, batch: BERTBatch, x: Tensor | None) -> Tensor:
        """Hidden states, or in the last stage the sum of each part, [4] float64."""
        inputs, targets = self.inputs(chunk, batch)
        return chunk.sums(inputs, targets, x)
