"""The rows of each step, and their micro-batches of sequences of about equal length.

Both are functions of the rows' lengths, the seed and the step: every rank computes the same plan at any
layout, and a resumed run continues where it stopped.

Shapes: E examples of a micro-batch, C texts of each, T = E * C texts, S tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlm.finetune.examples import Example
from mlm.parallel.config import IGNORE_INDEX
from mlm.training.pipelined import PipelinedModel
from mlm.util.splitmix import Bits, draw, root
from mlm.util.system import resolve

Ids = NDArray[np.int64]

ORDER, BATCHES = 0, 1
"""Draws of the seed's stream: the order of an epoch's rows, and the order of its batches."""


@dataclass(frozen=True, eq=False)
class TaskBatch:
    """One micro-batch."""

    tokens: Tensor
    """[T, S] int64, padded on the right; the C texts of an example are consecutive."""
    token_types: Tensor
    """[T, S] int64: 1 for the second text of a pair."""
    lengths: Tensor
    """[T] int64: tokens before the padding."""
    labels: Tensor
    """Targets. [E] int64 (classification, choice) or [E, 2] int64 (span: first and last token), −100 where
    not scored; [E] float64 (regression), NaN where not scored."""
    first_sample: int
    """Number of its first example in the run: dropout streams are a function of it."""
    examples: tuple[int, ...] = ()
    """Numbers of the examples; empty in a filler."""

    def sample(self, text: int, position: int | None = None) -> int:
        """Return the number of the example of a text, for incidents; -1 in a filler."""
        number = text // (len(self.tokens) // len(self.labels))
        return self.examples[number] if number < len(self.examples) else -1


class ExampleOrder:
    """The batches of each epoch: each example once, with examples of about equal length per batch.

    Args:
        examples: all training examples.
        sort_batches: batches whose examples are sorted together.
    """

    def __init__(self, examples: Sequence[Example], *, batch_size: int, sort_batches: int, seed: int) -> None:
        self.lengths = np.array([max(map(len, example.texts)) for example in examples])
        self.batch_size, self.sort_batches, self.seed = batch_size, sort_batches, seed
        self._epoch: tuple[int, list[Ids]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def batch(self, step: int) -> Ids:
        """Return the examples of a step, counted from 0, the longest first."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = epoch, self.epoch(epoch)
        return self._epoch[1][number]

    def epoch(self, number: int) -> list[Ids]:
        state, count, b = draw(root(self.seed), number), len(self.lengths), self.batch_size
        shuffled = permutation(count, draw(state, ORDER))
        batches: list[Ids] = []
        for pool in np.split(shuffled, range(b * self.sort_batches, count, b * self.sort_batches)):
            ordered = pool[np.argsort(-self.lengths[pool], kind="stable")]
            batches += np.split(ordered, range(b, len(ordered), b))
        return [batches[i] for i in permutation(len(batches), draw(state, BATCHES))]


def permutation(count: int, state: Bits) -> Ids:
    return np.argsort(draw(state, np.arange(count)), kind="stable")


@dataclass(frozen=True, kw_only=True)
class Batcher:
    """Splits a batch into micro-batches and assigns them to data-parallel ranks."""

    budget: int
    """Tokens of a micro-batch, padding included; a longer example is a micro-batch alone."""
    rank: int
    size: int
    """Data-parallel rank and size."""
    groups_of: int = 1
    """Divisor of a rank's number of micro-batches: the pipeline's stages, to keep all of them busy."""
    multiple: int = 1
    """Divisor of the padded length: tp with sequence parallelism."""
    length: int = 0
    """Maximum tokens of a text."""

    def micro_batches(
        self, examples: Sequence[Example], numbers: Sequence[int], first_sample: int
    ) -> list[TaskBatch]:
        """Return this rank's micro-batches of the numbered examples; equally many on each rank.

        A text's dropout stream is a function of its position in the batch, at any layout.

        Args:
            examples: all examples of a split.
            numbers: the batch, the longest first.
            first_sample: number of the batch's first example in the whole run.
        """
        units = self.sequences(examples, numbers)
        longest = max(self.tokens(examples, unit) for unit in units)
        rows = min(max(1, self.budget // longest), len(units))
        count = -(-len(units) // (rows * self.size))
        count = -(-count // self.groups_of) * self.groups_of
        rows = -(-len(units) // (count * self.size))
        batches = []
        for i in range(count):
            first = (i * self.size + self.rank) * rows
            units_of_rank = units[first : first + rows]
            batches.append(self.batch(examples, units_of_rank, numbers[-1], first_sample + first))
        return batches

    def sequences(self, examples: Sequence[Example], numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbered examples in indivisible units of a micro-batch, here of one example."""
        return [[n] for n in numbers]

    def tokens(self, examples: Sequence[Example], unit: Sequence[int]) -> int:
        texts = examples[unit[0]].texts
        return max(map(len, texts)) * len(texts)

    def batch(
        self, examples: Sequence[Example], units: Sequence[Sequence[int]], filler: int, first_sample: int
    ) -> TaskBatch:
        """Return a micro-batch; without examples it holds `filler`, not scored."""
        numbers = [n for unit in units for n in unit]
        rows = [examples[n] for n in numbers or [filler]]
        texts = [text for row in rows for text in row.texts]
        longest = max(map(len, texts))
        width = -(-longest // self.multiple) * self.multiple
        tokens = np.zeros((len(texts), width), dtype=np.int64)
        types = np.zeros_like(tokens)
        for i, text in enumerate(texts):
            tokens[i, : len(text)] = text.tokens
            types[i, text.second : len(text)] = 1
        labels = stack_labels(rows)
        if not numbers:
            labels = torch.full_like(labels, math.nan if labels.is_floating_point() else IGNORE_INDEX)
        lengths = torch.tensor([len(text) for text in texts])
        return TaskBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(types),
            lengths,
            labels,
            first_sample * len(rows[0].texts),
            tuple(int(n) for n in numbers),
        )

    def all_batches(self, examples: Sequence[Example]) -> Iterator[TaskBatch]:
        """Yield this rank's micro-batches of all examples, the longest first.

        A lack of memory then shows at once.
        """
        order = sorted(range(len(examples)), key=lambda n: -self.tokens(examples, [n]))
        first = 0
        while first < len(order):
            last = self.end_of_round(examples, order, first)
            yield from self.micro_batches(examples, order[first:last], first)
            first = last

    def end_of_round(self, examples: Sequence[Example], order: Sequence[int], first: int) -> int:
        """Return the end, in `order`, of the examples that fill `groups_of` micro-batches of each rank."""
        rows = max(1, self.budget // self.tokens(examples, order[first : first + 1]))
        return min(first + rows * self.size * self.groups_of, len(order))


def stack_labels(rows: Sequence[Example]) -> Tensor:
    labels = [row.label for row in rows]
    if any(isinstance(label, tuple) for label in labels):
        return torch.tensor([(IGNORE_INDEX, IGNORE_INDEX) if label is None else label for label in labels])
    if any(isinstance(label, float) for label in labels):
        numbers = [math.nan if label is None else label for label in labels]
        return torch.tensor(numbers, dtype=torch.float64)
    return torch.tensor([IGNORE_INDEX if label is None else label for label in labels])


def make_batcher(
    model: PipelinedModel, micro_batch_size: int, max_length: int, kind: type[Batcher] | str = Batcher
) -> Batcher:
    """Return the batcher of this rank: micro-batches of `micro_batch_size` texts of `max_length` tokens."""
    ctx = model.ctx
    batcher: type[Batcher] = resolve(kind) if isinstance(kind, str) else kind
    return batcher(
        budget=micro_batch_size * max_length,
        rank=ctx.dp.rank,
        size=ctx.dp.size,
        groups_of=ctx.pp.size,
        multiple=ctx.tp.size if model.chunks[0].sequence_parallel else 1,
        length=max_length,
    )
