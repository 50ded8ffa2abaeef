"""Conversations packed into sequences, and the loss on their answers.

The conversations of a step are put into as few sequences as they fit in; a token attends to its own
conversation alone, and positions restart in each. So packing changes no loss: it leaves out padding.

Shapes: B sequences of a micro-batch, S tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlm.data.sampler import Batch
from mlm.finetune.batches import Batcher
from mlm.finetune.examples import Example
from mlm.models.documents import Documents, document_positions, document_spans
from mlm.models.gpt2.model import NextToken
from mlm.parallel.collectives import to_device
from mlm.parallel.labels import IGNORE_INDEX
from mlm.parallel.mesh import ParallelContext
from mlm.training.pipelined import PipelinedModel
from mlm.training.pipelined import evaluate as mean_parts


@dataclass(frozen=True, eq=False)
class PackedBatch(Batch):
    """One micro-batch; the label of a token is the next one, where an answer holds that, else −100."""

    ends: Tensor | None
    """[B, S] bool: the last token of each conversation; None if no sequence holds two."""
    examples: tuple[int, ...] = ()
    """Numbers of its conversations."""

    def sample(self, row: int, position: int | None = None) -> int:
        """Return the number of the conversation at a position (or first) in a sequence, for incidents.

        -1 where it only fills up.
        """
        if not self.examples:
            return -1
        if self.ends is None:
            return self.examples[row]
        before = int(self.ends[:row].sum()) + int(self.ends[row, : position or 0].sum())
        return self.examples[min(before, len(self.examples) - 1)]


class Packer(Batcher):
    """Splits the conversations of a batch into micro-batches of packed sequences."""

    def sequences(self, examples: Sequence[Example], numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbered conversations in packs of a sequence each, the longest first."""
        lengths = [example_tokens(examples[n]) for n in numbers]
        room = self.length * len(examples[numbers[0]].texts)
        packs = [[numbers[i] for i in pack] for pack in first_fit(lengths, room)]
        return sorted(packs, key=lambda pack: -self.tokens(examples, pack))

    def tokens(self, examples: Sequence[Example], unit: Sequence[int]) -> int:
        """Return the tokens of a pack."""
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
            place = 0
            for n in pack:
                whole = examples[n].label
                of_texts = whole.texts if isinstance(whole, PairLabel) else (whole,)
                for text, label in zip(examples[n].texts, of_texts, strict=True):
                    tokens[row, place : place + len(text)] = text.tokens
                    if units:
                        labels[row, place : place + len(text)] = label
                    place += len(text)
                    ends[row, place - 1] = True
        return PackedBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            first_sample,
            torch.from_numpy(ends) if (ends.sum(1) > 1).any() else None,
            tuple(int(n) for pack in units for n in pack),
        )

    def all_batches(self, examples: Sequence[Example]) -> Iterator[PackedBatch]:  # type: ignore[override]
        """Yield this rank's micro-batches of all conversations, the longest first."""
        order = sorted(range(len(examples)), key=lambda n: -example_tokens(examples[n]))
        room, first, tokens = self.budget * self.size * self.groups_of, 0, 0
        for i, number in enumerate(order):
            length = example_tokens(examples[number])
            if first < i and tokens + length > room:
                yield from self.micro_batches(examples, order[first:i], first)  # type: ignore[misc]
                first, tokens = i, 0
            tokens += length
        yield from self.micro_batches(examples, order[first:], first)  # type: ignore[misc]


def example_tokens(example: Example) -> int:
    """Return the tokens of an example's texts, which are packed together."""
    return sum(map(len, example.texts))


@dataclass(eq=False)
class PairLabel:
    """Labels of a chosen and a rejected answer, and what a reference model says of them."""

    texts: tuple[NDArray[np.int64], NDArray[np.int64]]
    """Of each text, the next token where an answer holds it, else −100."""
    reference: tuple[float, float] = (0.0, 0.0)
    """Log-likelihoods of both answers by the model that training began with; 0 where the loss needs none."""


def first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the numbers of texts, the longest first, in packs of at most `room` tokens.

    Each goes into the first pack with room for it (first-fit decreasing); a longer text is a pack alone.
    """
    packs, left = list[list[int]](), list[int]()
    for number, length in enumerate(lengths):
        pack = next((i for i, free in enumerate(left) if length <= free), None)
        if pack is None:
            packs.append([number])
            left.append(room - length)
        else:
            packs[pack].append(number)
            left[pack] -= length
    return packs


class AnswerLoss(NextToken):
    """Cross-entropy of each token of an answer given its conversation before it, in nats."""

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype) -> None:
        super().__init__(ctx, dtype, None)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Documents | None]:
        """Tokens and labels of a micro-batch, on the device, and the conversations to keep apart in it."""
        assert isinstance(batch, PackedBatch)
        tokens, labels = (to_device(t, self.ctx.device) for t in (batch.tokens, batch.labels))
        if batch.ends is None:
            return tokens, labels, None
        ends = to_device(batch.ends, self.ctx.device)
        # padding may be longer than any text, and the positions that a model has
        is_padding = ends.flip(1).cumsum(1).flip(1) == 0
        positions = document_positions(ends).masked_fill(is_padding, 0)
        return tokens, labels, Documents(positions, document_spans(ends, self.dtype))

    def scores(self, means: Sequence[float]) -> dict[str, float]:
        """Return the metrics of a validation: mean loss per token of the answers, and its perplexity."""
        (loss,) = means
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


def answer_scores(
    model: PipelinedModel, objective: AnswerLoss, examples: Sequence[Example], packer: Packer
) -> dict[str, float]:
    """Return the metrics of a split; the same on every rank. Collective."""
    means, _ = mean_parts(model, objective, packer.all_batches(examples))  # type: ignore[arg-type]
    return objective.scores(means)
