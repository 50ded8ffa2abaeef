"""BERT: a bidirectional transformer, trained to predict masked tokens and the order of two segments.

With norm=pre it is Megatron-LM's BERT (arXiv:1909.08053, section 5.3, figure 7b; in transformers
MegatronBertForPreTraining), with norm=post the original (arXiv:1810.04805; BertForPreTraining).

Shapes: S sequence, B micro-batch, H hidden, V padded vocabulary, R masked tokens, t = tensor-parallel size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.models.backbone import Inputs, Transformer
from mlm.models.bert.samples import BERTBatch
from mlm.models.documents import padding_spans
from mlm.models.heads import MaskedTokenHead, PlainLinear
from mlm.parallel.collectives import gather_rows, to_device
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.cross_entropy import cross_entropy_and_hits, full_logits, token_scores
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.logits import loss_dtype
from mlm.parallel.mesh import ParallelContext

PARTS = ("mlm_loss", "sop_loss", "mlm_accuracy", "sop_accuracy")
"""Parts of the objective: cross-entropy of masked tokens (nats per masked token) and of the order of the
segments (nats per sample), both minimised, and the number of correct predictions of each."""


@dataclass(frozen=True, eq=False)
class MaskedTargets:
    """Targets of a micro-batch, on the device. Only masked tokens go through the head."""

    places: Tensor
    """[R] int64: s * B + b for the masked token s of text b. With sequence parallelism of this tp rank's rows
    of the sequence, padded to equal numbers; with exact=N of each part of the sequence."""
    labels: Tensor
    """[R] int64, or [t * R] with sequence parallelism, by tp rank; padded by IGNORE_INDEX."""
    is_swapped: Tensor
    """[B] int64: 1 if the second segment comes first in its document, -100 if not scored."""


def masked_targets(
    labels: Tensor, is_swapped: Tensor, *, parts: int = 1, local_parts: range = range(1)
) -> MaskedTargets:
    """Targets of labels [B, S] on the host, IGNORE_INDEX where nothing is masked.

    Targets are padded to equal numbers in each of the `parts` of the sequence; this rank has `local_parts`.
    """
    rows = labels.t().reshape(parts, -1)  # [parts, S / parts * B]
    is_masked = rows != IGNORE_INDEX
    most = max(1, int(is_masked.sum(1).max()))
    places = torch.zeros(parts, most, dtype=torch.int64)
    targets = torch.full((parts, most), IGNORE_INDEX, dtype=torch.int64)
    for p in range(parts):
        masked = is_masked[p].nonzero().flatten()
        places[p, : len(masked)], targets[p, : len(masked)] = masked, rows[p, masked]
    first_rows = torch.arange(len(local_parts)).unsqueeze(1) * rows.shape[1]
    places = places[local_parts.start : local_parts.stop] + first_rows
    return MaskedTargets(places.flatten(), targets.flatten(), is_swapped)


class MaskedLanguageModel(Transformer):
    """Encoder that predicts masked tokens, or has a finetuning head (`outputs`), or none."""

    pools: ClassVar[bool] = True

    def _add_head(self) -> None:
        super()._add_head()
        if self.config.head == "language_model":
            self.mlm_head = MaskedTokenHead(self.config, tp=self.tp)

    def forward(
        self,
        inputs: Inputs,
        targets: MaskedTargets,
        scale: Tensor,
        stream: DropoutStream | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Last stage: differentiable losses of a micro-batch and hits: [2], in BERT `PARTS`, [4].

        Other stages: hidden states. `scale`, of the same size, multiplies the sums over masked tokens (loss
        and hits) and over samples.
        """
        h = self.encode(inputs, stream, x)
        if not self.stage.is_last:
            return h
        masked = self.mlm_head(h.flatten(0, 1)[targets.places])  # [R, H]
        bias = self.mlm_head.vocabulary.bias
        loss, hits = cross_entropy_and_hits(masked, targets.labels, self.token, bias, scale[0])
        order = [(loss.sum() * scale[1], hit.sum() * scale[3]) for loss, hit in self.order_scores(h, targets)]
        losses, all_hits = zip((loss, hits), *order, strict=True)
        return torch.stack([*losses, *all_hits])

    @torch.no_grad()
    def sums(self, inputs: Inputs, targets: MaskedTargets, x: Tensor | None = None) -> Tensor:
        """Last stage: these parts summed over masked tokens and samples, float64. Others: hidden states."""
        h = self.encode(inputs, None, x)
        if not self.stage.is_last:
            return h
        masked = self.mlm_head(h.flatten(0, 1)[targets.places])
        masked = gather_rows(masked, self.tp) if self.sequence_parallel else masked
        scores = token_scores(masked, targets.labels, self.token, self.mlm_head.vocabulary.bias)
        losses, hits = zip(scores, *self.order_scores(h, targets), strict=True)
        return torch.stack([part.sum(dtype=torch.float64) for part in (*losses, *hits)])

    def order_scores(self, h: Tensor, targets: MaskedTargets) -> Sequence[tuple[Tensor, Tensor]]:
        """Losses and hits of sentence-order prediction, [B] each; empty without that head."""
        return ()

    @torch.no_grad()
    def logits(self, tokens: Tensor, x: Tensor | None = None) -> Tensor:
        """Last stage: logits of the masked-LM head at each token, on every tp rank. Others: hidden states.

        tokens [B, S] of one segment (token type 0), without padding -> [B, S, vocab_size], float32 (float64
        for float64). Without dropout or sequence parallelism.
        """
        assert not self.sequence_parallel
        lengths = torch.full((tokens.shape[0],), tokens.shape[1], device=tokens.device)
        h = self.encode(Inputs(tokens, lengths), None, x)
        if not self.stage.is_last:
            return h
        y = self.token_logits(h.flatten(0, 1))  # [S * B, vocab_size]
        return y.to(loss_dtype(y.dtype)).view(*h.shape[:2], -1).transpose(0, 1)

    def token_logits(self, rows: Tensor) -> Tensor:
        """Logits of the masked-LM head for hidden states [R, H]: [R, vocab_size], on every tp rank."""
        local_bias = self.mlm_head.vocabulary.bias
        bias = local_bias if self.tp.size == 1 else gather_rows(local_bias, self.tp)
        return full_logits(self.mlm_head(rows), self.token) + bias[: self.config.vocab_size]


class BERT(MaskedLanguageModel):
    """BERT with its pretraining heads, a finetuning head (`outputs`), or none."""

    def _add_head(self) -> None:
        super()._add_head()
        if self.config.head == "language_model":
            self.sop_head = PlainLinear(self.config.hidden_size, 2, init_std=self.config.init_std)

    def order_scores(self, h: Tensor, targets: MaskedTargets) -> Sequence[tuple[Tensor, Tensor]]:
        logits = self.gather_outputs(self.sop_head(self.pool(h)))[0]
        logits = logits.to(loss_dtype(logits.dtype))
        is_swapped = targets.is_swapped
        losses = F.cross_entropy(logits, is_swapped, ignore_index=IGNORE_INDEX, reduction="none")
        return [(losses, (logits.detach().argmax(-1) == is_swapped).to(losses.dtype))]


class MaskedTokens:
    """Cross-entropy of masked tokens."""

    metrics: tuple[str, ...] = ("mlm_loss", "mlm_accuracy")
    num_losses = 1
    methods: tuple[str, ...] = ("sums",)

    def __init__(self, data: DataConfig, ctx: ParallelContext, dtype: torch.dtype) -> None:
        self.ctx, self.dtype = ctx, dtype

    def inputs(self, chunk: MaskedLanguageModel, batch: BERTBatch) -> tuple[Inputs, MaskedTargets]:
        to = partial(to_device, device=self.ctx.device)
        spans = padding_spans(batch.lengths, batch.tokens.shape[1], self.dtype, self.ctx.device)
        tp, ranks, rank = self.ctx.tp, 1, 0
        if chunk.sequence_parallel:
            ranks, rank = tp.size, tp.rank
        types, kinds = None, chunk.config.token_types
        if kinds > 1 or (kinds and tp.exact_parts):  # exact: a single type is looked up, too
            types = to(batch.token_types.clamp(max=kinds - 1))
        inputs = Inputs(to(batch.tokens), to(batch.lengths), types, spans)
        parts = tp.exact_parts or ranks
        local_parts = range(rank * parts // ranks, (rank + 1) * parts // ranks)
        # on the host: `nonzero` on the device would synchronise
        targets = masked_targets(batch.labels, batch.is_swapped, parts=parts, local_parts=local_parts)
        return inputs, MaskedTargets(to(targets.places), to(targets.labels), to(targets.is_swapped))

    def counts(self, batch: BERTBatch) -> Sequence[int]:
        masked = int((batch.labels != IGNORE_INDEX).sum())
        return masked, masked

    def output(
        self,
        chunk: MaskedLanguageModel,
        batch: BERTBatch,
        scale: Tensor,
        stream: DropoutStream | None,
        x: Tensor | None,
    ) -> Tensor:
        """Hidden states, or in the last stage scale * the sum of each part."""
        inputs, targets = self.inputs(chunk, batch)
        y: Tensor = chunk(inputs, targets, scale, stream, x)
        return y

    def sums(self, chunk: MaskedLanguageModel, batch: BERTBatch, x: Tensor | None) -> Tensor:
        """Hidden states, or in the last stage the sum of each part, float64."""
        inputs, targets = self.inputs(chunk, batch)
        return chunk.sums(inputs, targets, x)


class MaskedTokensAndOrder(MaskedTokens):
    """Cross-entropy of masked tokens and of the order of the segments (`PARTS`)."""

    metrics = PARTS
    num_losses = 2

    def counts(self, batch: BERTBatch) -> Sequence[int]:
        masked, _ = super().counts(batch)
        samples = int((batch.is_swapped != IGNORE_INDEX).sum())
        return masked, samples, masked, samples
