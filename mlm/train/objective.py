"""What a model is trained for: the numbers that a micro-batch gives, and what each is divided by."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mlm.data.sampler import Batch, BERTBatch
from mlm.models.backbone import Inputs
from mlm.models.bert.model import BERT, PARTS, Targets, masked_targets
from mlm.models.documents import Boundaries, Documents, without_padding
from mlm.models.gpt2.model import GPT2
from mlm.parallel.cross_entropy import IGNORE
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.random import DropoutStream
from mlm.train.config import PretrainConfig


class Texts(Protocol):
    """What every micro-batch has, whatever else a pass without gradients is told."""

    @property
    def tokens(self) -> Tensor:
        """[B, S] int64."""
        ...


class Samples(Texts, Protocol):
    """What a micro-batch to train on has, too."""

    @property
    def first_sample(self) -> int:
        """Number of its first sample in the whole run: dropout streams are a function of it."""
        ...


B = TypeVar("B", bound=Samples, contravariant=True)


class Objective(Protocol[B]):
    """What a model is trained for. Its `parts` are k numbers; the first `losses` of them are minimised."""

    parts: tuple[str, ...]
    losses: int
    methods: tuple[str, ...]
    """Methods of the model that it calls, besides `forward`."""

    def counts(self, batch: B) -> Sequence[int]:
        """What each part of a micro-batch is a sum over: scored tokens, samples. Computed on the host."""
        ...

    def output(
        self, chunk: Any, batch: B, scale: Tensor, stream: DropoutStream | None, x: Tensor | None
    ) -> Tensor:
        """The chunk's hidden states, or in the last stage `scale` [k] times each part's sum: [k], of which
        the losses are differentiable."""
        ...

    def sums(self, chunk: Any, batch: B, x: Tensor | None) -> Tensor:
        """The same without dropout, gradients and scale: [k] float64."""
        ...


class NextToken:
    """GPT-2's: cross-entropy of each token given those before it, in nats.

    `boundaries` says what begins anew with each document of a sample; None where nothing does.
    """

    parts: tuple[str, ...] = ("loss",)
    losses = 1
    methods: tuple[str, ...] = ("losses",)

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype, boundaries: Boundaries | None) -> None:
        self.ctx, self.dtype, self.boundaries = ctx, dtype, boundaries

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Documents | None]:
        """Tokens and labels of a micro-batch, on the device, and the documents to keep apart in it."""
        tokens = batch.tokens.to(self.ctx.device, non_blocking=True)
        labels = batch.labels.to(self.ctx.device, non_blocking=True)
        if self.boundaries is None:
            return tokens, labels, None
        documents = self.boundaries.documents(tokens, self.dtype)
        return tokens, self.boundaries.scored(tokens, labels), documents

    def counts(self, batch: Batch) -> Sequence[int]:
        labels = batch.labels
        if self.boundaries is not None:
            labels = self.boundaries.scored(batch.tokens, labels)
        return (int((labels != IGNORE).sum()),)

    def output(
        self, chunk: GPT2, batch: Batch, scale: Tensor, stream: DropoutStream | None, x: Tensor | None
    ) -> Tensor:
        tokens, labels, documents = self.inputs(batch)
        y: Tensor = chunk(tokens, labels, scale[0], stream, x, documents)
        return y.unsqueeze(0) if chunk.stage.is_last else y

    def sums(self, chunk: GPT2, batch: Batch, x: Tensor | None) -> Tensor:
        tokens, labels, documents = self.inputs(batch)
        y = chunk.losses(tokens, labels, x, documents)
        return y.sum(dtype=torch.float64).unsqueeze(0) if chunk.stage.is_last else y


class MaskedTokens:
    """BERT's: masked tokens, and the order of the two segments (mlm.models.bert.model.PARTS)."""

    parts: tuple[str, ...] = PARTS
    losses = 2
    methods: tuple[str, ...] = ("sums",)

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype) -> None:
        self.ctx, self.dtype = ctx, dtype

    def inputs(self, chunk: BERT, batch: BERTBatch) -> tuple[Inputs, Targets]:
        """What the model reads of a micro-batch and what it is to say, on the device."""
        device = self.ctx.device
        spans = without_padding(batch.lengths, batch.tokens.shape[1], self.dtype, device)
        cut = {"parts": self.ctx.tp.size, "part": self.ctx.tp.rank} if chunk.sequence_parallel else {}
        targets = masked_targets(batch.labels, batch.is_swapped, **cut)
        places, labels, is_swapped = (
            t.to(device, non_blocking=True) for t in (targets.places, targets.labels, targets.is_swapped)
        )
        tokens, lengths, token_types = (
            t.to(device, non_blocking=True) for t in (batch.tokens, batch.lengths, batch.token_types)
        )
        return Inputs(tokens, lengths, token_types, spans), Targets(places, labels, is_swapped)

    def counts(self, batch: BERTBatch) -> Sequence[int]:
        masked = int((batch.labels != IGNORE).sum())
        samples = int((batch.is_swapped != IGNORE).sum())
        return masked, samples, masked, samples

    def output(
        self, chunk: BERT, batch: BERTBatch, scale: Tensor, stream: DropoutStream | None, x: Tensor | None
    ) -> Tensor:
        inputs, targets = self.inputs(chunk, batch)
        y: Tensor = chunk(inputs, targets, scale, stream, x)
        return y

    def sums(self, chunk: BERT, batch: BERTBatch, x: Tensor | None) -> Tensor:
        inputs, targets = self.inputs(chunk, batch)
        return chunk.sums(inputs, targets, x)


def pretraining(config: PretrainConfig, ctx: ParallelContext, dtype: torch.dtype) -> Objective[Any]:
    """What the model of a run is pretrained for; `dtype` is that of activations."""
    if config.model.kind == "bert":
        return MaskedTokens(ctx, dtype)
    return NextToken(ctx, dtype, Boundaries.of(config.data))
