"""GPT-2, its layers split over the tensor-parallel ranks and assigned to pipeline stages; its objective.

Shapes: S sequence, B micro-batch, H hidden, V padded vocabulary, t = tensor-parallel size, c =
context-parallel size. Between layers and stages the hidden states are [S/c, B, H], with sequence parallelism
[S/(ct), B, H].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.backbone import Transformer
from mlm.models.cache import Reading
from mlm.models.documents import Boundaries, Documents
from mlm.parallel.collectives import all_reduce, gather_rows, to_device
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.context import local_positions, local_tokens
from mlm.parallel.cross_entropy import (
    differentiable_losses,
    full_logits,
    linear_cross_entropy,
    token_losses,
    token_scores,
)
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.logits import loss_dtype
from mlm.parallel.mesh import ParallelContext


class GPT2(Transformer):
    """Decoder-only transformer with an output layer tied to the token table."""

    @property
    def vocabulary(self) -> VocabParallelEmbedding:
        """The weights of the output layer, in the last stage."""
        return self.token

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        scale: Tensor | None = None,
        stream: DropoutStream | None = None,
        x: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Last stage: scale * sum of a micro-batch's token losses, 0-d. Others: hidden states for the next.

        Over cp ranks the sum is of this rank's tokens.

        Args:
            tokens: [B, S] int64.
            labels: [B, S] int64; labels of -100 are not scored.
            scale: 0-d float tensor; None means 1 / the micro-batch's scored tokens, for their mean loss.
            stream: dropout masks; None without dropout.
            x: hidden states of the previous stage; None in the first stage.
            documents: None unless attention or positions restart at each document of a sample.
        """
        h = self.hidden_states(tokens, stream, x, documents)
        if not self.stage.is_last:
            return h
        if scale is None:
            scale = 1 / (labels != IGNORE_INDEX).sum().clamp(min=1).to(loss_dtype(h.dtype))
        labels = local_tokens(labels, self.cp, 1)
        return linear_cross_entropy(h.flatten(0, 1), labels.t().flatten(), self.vocabulary, scale)

    def hidden_states(
        self,
        tokens: Tensor,
        stream: DropoutStream | None = None,
        x: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the hidden states after this stage's layers, normed in the last.

        The first stage reads `tokens` [B, S], the others the hidden states `x` of the previous stage.
        """
        spans, positions = (None, None) if documents is None else (documents.spans, documents.positions)
        if x is None:
            x = self.embed(tokens, stream, positions)
        return self.run_layers(x, stream, spans, positions)

    @torch.no_grad()
    def losses(
        self, tokens: Tensor, labels: Tensor, x: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """Last stage: the losses of this cp rank's tokens, [B, S/c]. Others: hidden states. No dropout."""
        h = self.hidden_states(tokens, None, x, documents)
        if not self.stage.is_last:
            return h
        h = gather_rows(h, self.tp) if self.sequence_parallel else h
        labels = local_tokens(labels, self.cp, 1)
        losses = token_losses(h.flatten(0, 1), labels.t().flatten(), self.vocabulary)
        return losses.view(h.shape[0], h.shape[1]).t()

    def log_likelihoods(
        self,
        tokens: Tensor,
        labels: Tensor,
        stream: DropoutStream | None = None,
        x: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Last stage: log-likelihoods of labels, differentiable, 0 where not scored. Others: hidden states.

        Arguments as of `forward`, without context parallelism. [B, S] float32 (float64 for float64), the same
        on every tp rank.
        """
        assert self.cp.size == 1
        h = self.hidden_states(tokens, stream, x, documents)
        if not self.stage.is_last:
            return h
        losses = differentiable_losses(h.flatten(0, 1), labels.t().flatten(), self.vocabulary)
        return -losses.view(labels.shape[1], labels.shape[0]).t()

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, places: Tensor, x: Tensor | None = None) -> Tensor:
        """Last stage: logits of the token after position `places[b]` of sequence b. Others: hidden states.

        At every training layout; without dropout. tokens [B, S] int64, places [B] int64 -> [B, vocab_size],
        float32 (float64 for float64), on every tp and cp rank.
        """
        h = self.hidden_states(tokens, None, x)
        if not self.stage.is_last:
            return h
        h = gather_rows(h, self.tp) if self.sequence_parallel else h  # [S/c, B, H]
        rows = torch.arange(len(places), device=places.device)
        if self.cp.parts == 1:
            last = h[places, rows]
        else:
            is_place = local_positions(tokens.shape[1], self.cp, places.device)[:, None] == places  # [S/c, B]
            local = torch.where(is_place.any(0)[:, None], h[is_place.int().argmax(0), rows], 0)
            last = all_reduce(local, self.cp)
        y = full_logits(last, self.vocabulary)
        return y.to(loss_dtype(y.dtype))

    # The following methods take no sequence parallelism, as tp does not divide the lengths of sequences.

    @torch.no_grad()
    def scores(self, tokens: Tensor, places: Tensor, labels: Tensor, x: Tensor | None = None) -> Tensor:
        """Last stage: the losses of `labels`, and 1 where they are the most probable. Others: hidden states.

        Args:
            tokens: [B, S] int64.
            places: [R] int64 rows of the flattened hidden states: s * B + b is row b's token s. Only these go
                through the vocabulary projection.
            labels: [R] int64 tokens after `places`; a place may occur several times.
            x: hidden states of the previous stage; None in the first stage.

        Returns:
            [2, R] float32 (float64 for float64), the same on every tp rank: see `token_scores`.
        """
        h = self.hidden_states(tokens, None, x)
        return token_scores(h.flatten(0, 1)[places], labels, self.vocabulary) if self.stage.is_last else h

    @torch.no_grad()
    def logits(self, tokens: Tensor, x: Tensor | None = None) -> Tensor:
        """Last stage: logits of the token after each token, on every tp rank. Others: hidden states.

        tokens [B, S] -> [B, S, vocab_size], float32 (float64 for float64). Without dropout.
        """
        h = self.hidden_states(tokens, None, x)
        if not self.stage.is_last:
            return h
        y = full_logits(h.flatten(0, 1), self.vocabulary)  # [S * B, vocab_size]
        return y.to(loss_dtype(y.dtype)).view(*h.shape[:2], -1).transpose(0, 1)

    @torch.no_grad()
    def read(self, tokens: Tensor, reading: Reading, x: Tensor | None = None) -> Tensor:
        """Extend the cached sequences by `tokens` [B, S], a step of incremental decoding.

        Last stage: logits of the next tokens, [B, vocab_size], on every tp rank; an empty tensor [0] without
        `reading.wants_logits`. Others: hidden states.
        """
        assert not self.sequence_parallel
        assert self.cp.size == 1
        positions = None if reading.documents is None else reading.documents.positions
        if x is None:
            x = self.embed(tokens, None, positions)
        rotary = self.rotary(x, positions, reading.lengths)
        angles = () if rotary is None else (rotary,)
        for layer in self.layers.values():
            x = layer(x, None, None, reading, *angles)
        if not self.stage.is_last:
            return x
        if not reading.wants_logits:
            return x.new_empty(0)
        return full_logits(self.apply_final_norm(x[-1]), self.vocabulary)


class NextToken:
    """Cross-entropy of the next token, in nats.

    `boundaries` restart attention or positions at each document of a sample; None for one document.
    """

    metrics: tuple[str, ...] = ("loss",)
    num_losses = 1
    methods: tuple[str, ...] = ("losses", "next_logits")

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype, boundaries: Boundaries | None) -> None:
        self.ctx, self.dtype, self.boundaries = ctx, dtype, boundaries

    @classmethod
    def of(cls, data: DataConfig, ctx: ParallelContext, dtype: torch.dtype) -> "NextToken":
        """The objective of a run; `dtype` is the activations'."""
        return cls(ctx, dtype, Boundaries.of(data))

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Documents | None]:
        """Tokens, labels and separate documents of a micro-batch, on the device."""
        tokens = to_device(batch.tokens, self.ctx.device)
        labels = to_device(batch.labels, self.ctx.device)
        if self.boundaries is None:
            return tokens, labels, None
        documents = self.boundaries.documents(tokens, self.dtype, batch.tokens)
        return tokens, self.boundaries.scored(tokens, labels), documents

    def counts(self, batch: Batch) -> Sequence[int]:
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
