"""What a model is finetuned for: the loss of each kind of task on the outputs of its head."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.finetune.batches import TaskBatch
from mlm.models.backbone import Inputs, Transformer
from mlm.models.documents import without_padding
from mlm.parallel.cross_entropy import wide
from mlm.parallel.labels import IGNORE
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.random import DropoutStream


def label_loss(outputs: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """Cross-entropy, summed: outputs [E, num_labels], labels [E]."""
    return F.cross_entropy(outputs, labels, ignore_index=IGNORE, reduction="sum")


def option_loss(outputs: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """Cross-entropy over the options, summed: outputs [E * C, 1], labels [E]."""
    return label_loss(outputs.view(len(labels), -1), labels, lengths)


def number_loss(outputs: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """Squared error, summed: outputs [E, 1], labels [E]; NaN is not scored."""
    is_scored = ~labels.isnan()
    return ((outputs[:, 0] - labels.nan_to_num().to(outputs.dtype)) * is_scored).square().sum()


def span_loss(outputs: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """Mean of the losses of an answer's first and last token (arXiv:1810.04805, section 4.2), summed.

    outputs [E, S, 2], labels [E, 2].
    """
    is_padding = torch.arange(outputs.shape[1], device=outputs.device) >= lengths[:, None]
    outputs = outputs.masked_fill(is_padding.unsqueeze(-1), torch.finfo(outputs.dtype).min)
    first, last = (label_loss(outputs[..., i], labels[:, i], lengths) for i in (0, 1))
    return (first + last) / 2


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "classification": label_loss,
    "choice": option_loss,
    "regression": number_loss,
    "span": span_loss,
}
"""By TaskConfig.kind: (outputs, labels, lengths [T]) -> 0-d."""


class Finetuning:
    """The objective of finetuning on one kind of task: the mean loss per example."""

    parts: tuple[str, ...] = ("loss",)
    losses = 1
    methods: tuple[str, ...] = ("outputs",)

    def __init__(self, kind: str, ctx: ParallelContext, dtype: torch.dtype) -> None:
        self.loss, self.ctx, self.dtype = LOSSES[kind], ctx, dtype

    def inputs(self, chunk: Transformer, batch: TaskBatch) -> Inputs:
        """What the model reads of a micro-batch, on the device."""
        device, config = self.ctx.device, chunk.config
        spans = None
        if not config.family.causal:  # a causal model looks at no padding anyway
            spans = without_padding(batch.lengths, batch.tokens.shape[1], self.dtype, device)
        tokens, lengths, types = (
            t.to(device, non_blocking=True) for t in (batch.tokens, batch.lengths, batch.token_types)
        )
        return Inputs(tokens, lengths, types if config.token_types else None, spans)

    def counts(self, batch: TaskBatch) -> Sequence[int]:
        labels = batch.labels
        if labels.is_floating_point():
            return (int((~labels.isnan()).sum()),)
        return (int((labels.reshape(len(labels), -1)[:, 0] != IGNORE).sum()),)

    def output(
        self,
        chunk: Transformer,
        batch: TaskBatch,
        scale: Tensor,
        stream: DropoutStream | None,
        x: Tensor | None,
    ) -> Tensor:
        y = chunk.outputs(self.inputs(chunk, batch), stream, x)
        if not chunk.stage.is_last:
            return y
        labels, lengths = (t.to(y.device, non_blocking=True) for t in (batch.labels, batch.lengths))
        return scale * self.loss(y.to(wide(y.dtype)), labels, lengths)

    def sums(self, chunk: Transformer, batch: TaskBatch, x: Tensor | None) -> Tensor:
        one = torch.ones(1, dtype=torch.float64, device=self.ctx.device)
        y = self.output(chunk, batch, one, None, x)
        return y.double() if chunk.stage.is_last else y
