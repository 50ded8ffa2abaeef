"""Pairs of answers packed into sequences, and the losses on their likelihoods.

Both answers of a pair are in one micro-batch, each in a text of its own with the prompt: a token attends to
its own text alone. What the model that training began with says of them is computed once, before training:
no second model is held.

Shapes: B sequences of a micro-batch, S tokens, E pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.finetune.config import REFERENCE_FREE, TaskConfig
from mlm.finetune.examples import Example
from mlm.finetune.packing import AnswerLoss, PackedBatch, Packer, PairLabel
from mlm.models.gpt2.model import GPT2
from mlm.parallel.collectives import all_reduce, to_device
from mlm.parallel.cross_entropy import loss_dtype
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.labels import IGNORE_INDEX
from mlm.parallel.mesh import ParallelContext
from mlm.training.pipelined import PipelinedModel


@dataclass(frozen=True, eq=False, kw_only=True)
class PairBatch(PackedBatch):
    """One micro-batch; texts are in the order chosen, rejected, of each of its pairs."""

    texts: Tensor
    """[B, S] int64: number of the text that a token is in; of padding that of the next."""
    lengths: Tensor
    """[E, 2] int64: scored tokens of both answers."""
    reference: Tensor
    """[E, 2] float64: log-likelihoods of both answers by the reference model."""

    def sample(self, row: int, position: int | None = None) -> int:
        """Return the number of the pair at a position (or first) in a sequence, for incidents."""
        number = int(self.texts[row, position or 0]) // 2
        return self.examples[min(number, len(self.examples) - 1)] if self.examples else -1


class PairPacker(Packer):
    """Splits the pairs of a batch into micro-batches of packed sequences, each of whole pairs."""

    def batch(  # type: ignore[override]
        self, examples: Sequence[Example], units: Sequence[Sequence[int]], filler: int, first_sample: int
    ) -> PairBatch:
        """Return a micro-batch of sequences; without any it holds `filler`, not scored."""
        packed = super().batch(examples, units, filler, first_sample)
        assert packed.ends is not None, "a pair is two texts"
        ends = packed.ends.flatten().long()
        labels = [examples[n].label for n in packed.examples]
        return PairBatch(
            **vars(packed),
            texts=(ends.cumsum(0) - ends).view_as(packed.tokens),
            lengths=torch.tensor([[int((y != IGNORE_INDEX).sum()) for y in pair.texts] for pair in labels]),
            reference=torch.tensor([pair.reference for pair in labels], dtype=torch.float64),
        )


class PairLoss(AnswerLoss):
    """A loss of task.loss, mean over pairs, and what is logged beside it.

    A reward is beta (log p - log p of the reference model); without one, beta log p per token.
    """

    methods = ("log_likelihoods",)
    losses = 1

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype, task: TaskConfig) -> None:
        super().__init__(ctx, dtype)
        self.task, self.has_reference = task, task.loss not in REFERENCE_FREE
        self.parts = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
        if self.has_reference:
            self.parts = (*self.parts, "kl")

    def counts(self, batch: PairBatch) -> Sequence[int]:  # type: ignore[override]
        """Return the number of pairs for each part."""
        return (len(batch.examples),) * len(self.parts)

    def likelihoods(
        self, chunk: GPT2, batch: PairBatch, stream: DropoutStream | None, x: Tensor | None
    ) -> Tensor:
        """Return hidden states, or in the last stage the log-likelihoods of both answers, [E, 2]."""
        tokens, labels, documents = self.inputs(batch)
        y: Tensor = chunk.log_likelihoods(tokens, labels, stream, x, documents)
        if not chunk.stage.is_last:
            return y
        pairs = len(batch.examples)
        texts = to_device(batch.texts, y.device).clamp(max=2 * max(pairs, 1))
        sums = y.new_zeros(2 * max(pairs, 1) + 1).index_add(0, texts.flatten(), y.flatten())
        return sums[: 2 * pairs].view(pairs, 2)

    def output(  # type: ignore[override]
        self, chunk: GPT2, batch: PairBatch, scale: Tensor, stream: DropoutStream | None, x: Tensor | None
    ) -> Tensor:
        """Return hidden states, or in the last stage scale * the sums of all parts, [k]."""
        y = self.likelihoods(chunk, batch, stream, x)
        if not chunk.stage.is_last:
            return y
        lengths, reference = (to_device(t.to(y.dtype), y.device) for t in (batch.lengths, batch.reference))
        parts = self.parts_of(y, lengths.view_as(y), reference.view_as(y))
        return scale * parts.sum(1).to(loss_dtype(y.dtype))

    @torch.no_grad()
    def sums(self, chunk: GPT2, batch: PairBatch, x: Tensor | None) -> Tensor:  # type: ignore[override]
        """Return hidden states, or in the last stage the sums of all parts, [k] float64."""
        one = torch.ones(len(self.parts), dtype=torch.float64, device=self.ctx.device)
        y = self.output(chunk, batch, one, None, x)
        return y.double() if chunk.stage.is_last else y

    def parts_of(self, y: Tensor, lengths: Tensor, reference: Tensor) -> Tensor:
        """Return the parts of each pair, [k, E], of log-likelihoods, numbers of tokens, and the reference's.

        All are [E, 2] of (chosen, rejected); the first part alone is differentiable.
        """
        task, change, mean = self.task, y - reference, y / lengths.clamp(min=1)
        reward = task.beta * (change if self.has_reference else mean)
        lead = reward[:, 0] - reward[:, 1]
        if task.loss == "ipo":  # equation 17, of means per token as TRL has it
            gap = change / lengths.clamp(min=1)
            loss = (gap[:, 0] - gap[:, 1] - 1 / (2 * task.beta)).square()
        elif task.loss == "orpo":  # equations 4, 6 and 7; the odds of p = 1 are infinite
            odds = mean - (-torch.expm1(mean.clamp(max=-torch.finfo(mean.dtype).eps))).log()
            loss = -mean[:, 0] - task.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])
        else:
            lead_over = lead - task.margin if task.loss == "simpo" else lead
            smoothing = task.label_smoothing
            loss = -(1 - smoothing) * F.logsigmoid(lead_over) - smoothing * F.logsigmoid(-lead_over)
        reward, lead = reward.detach(), lead.detach()
        rest = [(lead > 0).to(loss.dtype), lead, reward[:, 0], reward[:, 1]]
        if self.has_reference:  # of log p_reference / p over both answers
            rest.append(-change.detach().mean(1))
        return torch.stack([loss, *rest])

    def scores(self, means: Sequence[float]) -> dict[str, float]:
        """Return the metrics of a validation."""
        return dict(zip(self.parts, means, strict=True))


def set_reference(
    model: PipelinedModel, objective: PairLoss, examples: Sequence[Example], packer: Packer
) -> None:
    """Let the model as it is be the reference of these pairs. Collective over all ranks."""
    flat = torch.zeros(len(examples), 2, dtype=torch.float64)  # each row is written by one rank

    def forward(chunk: GPT2, batch: PairBatch, x: Tensor | None) -> Tensor:
        return objective.likelihoods(chunk, batch, None, x)

    with torch.no_grad():
        for batch, result in model.evaluate(packer.all_batches(examples), forward):  # type: ignore[arg-type]
            if model.ctx.tp.rank == 0 and batch.examples:
                flat[list(batch.examples)] = result.double().cpu()
    for example, (chosen, rejected) in zip(examples, all_reduce(flat, model.ctx.world).tolist(), strict=True):
        assert isinstance(example.label, PairLabel)
        example.label.reference = chosen, rejected
