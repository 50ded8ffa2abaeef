"""Conversations and pairs of answers packed into sequences, and the losses on them.

A step's conversations are packed into few sequences; tokens attend within their conversation, and positions
restart in each, so that packing saves padding and changes no loss. Both answers of a pair are in one
micro-batch, each as a separate text with the prompt. The reference model's log-likelihoods are computed once,
before training: no second model is in memory.

Shapes: B sequences of a micro-batch, S tokens, E pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mlm.data.sampler import Batch
from mlm.finetune.batches import Batcher
from mlm.finetune.config import REFERENCE_FREE, TaskConfig
from mlm.finetune.examples import Example
from mlm.models.documents import Documents, document_positions, document_spans
from mlm.models.gpt2.model import GPT2, NextToken
from mlm.parallel.collectives import all_reduce, to_device
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.logits import loss_dtype
from mlm.parallel.mesh import ParallelContext
from mlm.training.pipelined import PipelinedModel


@dataclass(frozen=True, eq=False)
class PackedBatch(Batch):
    """One micro-batch; the label of a token is the next token if that is in an answer, else −100."""

    ends: Tensor | None
    """[B, S] bool: the last token of each conversation; None if no sequence holds two."""
    examples: tuple[int, ...] = ()
    """Numbers of its examples."""
    texts_per_example = 1

    def sample(self, row: int, position: int | None = None) -> int:
        """Return the number of the example at a position, for incidents; -1 in a filler."""
        if not self.examples:
            return -1
        if self.ends is None:
            return self.examples[row]
        before = int(self.ends[:row].sum()) + int(self.ends[row, : position or 0].sum())
        return self.examples[min(before // self.texts_per_example, len(self.examples) - 1)]


class Packer(Batcher):
    """Splits the conversations of a batch into micro-batches of packed sequences."""

    def sequences(self, examples: Sequence[Example], numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbered conversations in packs of a sequence each, the longest first."""
        lengths = [example_tokens(examples[n]) for n in numbers]
        room = self.length * len(examples[numbers[0]].texts)
        packs = [[numbers[i] for i in pack] for pack in first_fit(lengths, room)]
        return sorted(packs, key=lambda pack: -self.tokens(examples, pack))

    def tokens(self, examples: Sequence[Example], unit: Sequence[int]) -> int:
        return sum(example_tokens(examples[n]) for n in unit)

    def batch(  # type: ignore[override]
        self, examples: Sequence[Example], units: Sequence[Sequence[int]], filler: int, first_sample: int
    ) -> PackedBatch:
        """Return a micro-batch of sequences; without any it holds `filler`, not scored."""
        sequences = units or [[filler]]
        longest = max(self.tokens(examples, pack) for pack in sequences)
        width = -(-longest // self.multiple) * self.multiple
        tokens = np.zeros((len(sequences), width), dtype=np.int64)
        labels, ends = np.full_like(tokens, IGNORE_INDEX), np.zeros(tokens.shape, dtype=bool)
        for row, pack in enumerate(sequences):
            start = 0
            for n in pack:
                target = examples[n].label
                targets = target.texts if isinstance(target, PairLabel) else (target,)
                for text, label in zip(examples[n].texts, targets, strict=True):
                    tokens[row, start : start + len(text)] = text.tokens
                    if units:
                        labels[row, start : start + len(text)] = label
                    start += len(text)
                    ends[row, start - 1] = True
        return PackedBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            first_sample,
            torch.from_numpy(ends) if (ends.sum(1) > 1).any() else None,
            tuple(int(n) for pack in units for n in pack),
        )

    def end_of_round(self, examples: Sequence[Example], order: Sequence[int], first: int) -> int:
        room = self.budget * self.size * self.groups_of
        for last in range(first, len(order)):
            room -= example_tokens(examples[order[last]])
            if room < 0:
                return max(last, first + 1)
        return len(order)


def example_tokens(example: Example) -> int:
    return sum(map(len, example.texts))


@dataclass(eq=False)
class PairLabel:
    """Labels of a chosen and a rejected answer, and their reference log-likelihoods."""

    texts: tuple[NDArray[np.int64], NDArray[np.int64]]
    """For each text, the next token if it is in the answer, else −100."""
    reference: tuple[float, float] = (0.0, 0.0)
    """Log-likelihoods of both answers by the model before training; 0 if the loss does not need them."""


def first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack the numbers of texts, the longest first, into packs of at most `room` tokens.

    Each goes into the first pack with room for it (first-fit decreasing); a longer text is a pack alone.
    """
    packs, rooms = list[list[int]](), list[int]()
    for number, length in enumerate(lengths):
        pack = next((i for i, free in enumerate(rooms) if length <= free), None)
        if pack is None:
            packs.append([number])
            rooms.append(room - length)
        else:
            packs[pack].append(number)
            rooms[pack] -= length
    return packs


class AnswerLoss(NextToken):
    """Cross-entropy of each token of an answer given its conversation before it, in nats."""

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype) -> None:
        super().__init__(ctx, dtype, None)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Documents | None]:
        """Return tokens and labels of a micro-batch on the device, and its conversations if packed."""
        assert isinstance(batch, PackedBatch)
        tokens, labels = (to_device(t, self.ctx.device) for t in (batch.tokens, batch.labels))
        if batch.ends is None:
            return tokens, labels, None
        ends = to_device(batch.ends, self.ctx.device)
        # positions of padding may exceed max_positions
        is_padding = ends.flip(1).cumsum(1).flip(1) == 0
        positions = document_positions(ends).masked_fill(is_padding, 0)
        return tokens, labels, Documents(positions, document_spans(ends, self.dtype))

    def scores(self, means: Sequence[float]) -> dict[str, float]:
        (loss,) = means
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


@dataclass(frozen=True, eq=False, kw_only=True)
class PairBatch(PackedBatch):
    """One micro-batch; texts are in the order chosen, rejected, of each of its pairs."""

    texts: Tensor
    """[B, S] int64: number of the text that a token is in; padding has the number of the next text."""
    lengths: Tensor
    """[E, 2] int64: scored tokens of both answers."""
    reference: Tensor
    """[E, 2] float64: log-likelihoods of both answers by the reference model."""
    texts_per_example = 2


class PairPacker(Packer):
    """Splits the pairs of a batch into micro-batches of packed sequences, each of whole pairs."""

    def batch(  # type: ignore[override]
        self, examples: Sequence[Example], units: Sequence[Sequence[int]], filler: int, first_sample: int
    ) -> PairBatch:
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
    """The loss of task.loss, mean over pairs, and the metrics logged with it.

    A reward is beta (log p - log p_reference); without a reference model, beta log p per token.
    """

    methods = ("log_likelihoods",)
    num_losses = 1

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype, task: TaskConfig) -> None:
        super().__init__(ctx, dtype)
        self.task, self.has_reference = task, task.loss not in REFERENCE_FREE
        self.metrics = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
        if self.has_reference:
            self.metrics = (*self.metrics, "kl")

    def counts(self, batch: PairBatch) -> Sequence[int]:  # type: ignore[override]
        return (len(batch.examples),) * len(self.metrics)

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
        scale = torch.ones(len(self.metrics), dtype=torch.float64, device=self.ctx.device)
        y = self.output(chunk, batch, scale, None, x)
        return y.double() if chunk.stage.is_last else y

    def parts_of(self, y: Tensor, lengths: Tensor, reference: Tensor) -> Tensor:
        """Return `metrics` of each pair, [k, E]; only the loss, the first of them, is differentiable.

        Log-likelihoods y, token counts and reference log-likelihoods are [E, 2] of (chosen, rejected).
        """
        task, change, mean = self.task, y - reference, y / lengths.clamp(min=1)
        reward = task.beta * (change if self.has_reference else mean)
        lead = reward[:, 0] - reward[:, 1]
        if task.loss == "ipo":  # equation 17, on means per token as in TRL
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
        parts = [loss, (lead > 0).to(loss.dtype), lead, reward[:, 0], reward[:, 1]]
        if self.has_reference:  # kl: mean of log p_reference / p over both answers
            parts.append(-change.detach().mean(1))
        return torch.stack(parts)

    def scores(self, means: Sequence[float]) -> dict[str, float]:
        return dict(zip(self.metrics, means, strict=True))


def set_reference(
    model: PipelinedModel, objective: PairLoss, examples: Sequence[Example], packer: Packer
) -> None:
    """Set the pairs' reference log-likelihoods to the model's. Collective over all ranks."""
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
