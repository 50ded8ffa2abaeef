"""Sentences of a BERT sample, and its segments A and B.

A sample is a run of consecutive sentences of one document, as in Megatron-LM's build_mapping. From the front
of a document, a run ends with the sentence that reaches its target length, if it then has two or more
sentences and two or more remain; else with the document. A document of one sentence has no sample.

Sentences are the sequences of the corpus that hold tokens. Shapes: n samples.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlm.data.indexed import IndexedDataset
from mlm.util.splitmix import Bits, below, draw, uniform

CHUNK = 1 << 22
"""Sentences in memory at a time, or one document's."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class TargetLengths:
    """Target lengths: `longest`, or with probability `short_prob` uniform from 2 to `longest`.

    The target of the sample that begins at a sentence is a function of (state, number of that sentence).
    """

    state: Bits
    longest: int
    short_prob: float

    def of(self, sentences: Ids) -> Ids:
        """Target length in tokens of the samples that begin at these sentences: int64, same shape."""
        bits = draw(self.state, sentences)
        is_short = uniform(bits) < self.short_prob
        return np.where(is_short, 2 + below(draw(bits, 0), self.longest - 1), self.longest)


def find_spans(indexed: IndexedDataset, targets: TargetLengths) -> tuple[Ids, Ids]:
    """First sequence of each sample and the one after its last, in corpus order: int64 [n] and [n].

    Documents are read in chunks. Sentence k of a chunk begins at token places[k] and is the corpus's sequence
    numbers[k]; document d begins with sentence bounds[d].
    """
    documents = np.array(indexed.document_indices)
    spans, first, count = [np.empty((2, 0), dtype=np.int64)], 0, len(documents) - 1
    while first < count:
        reach = int(np.searchsorted(documents, documents[first] + CHUNK, side="right")) - 1
        last = min(count, max(first + 1, reach))
        low, high = int(documents[first]), int(documents[last])
        filled = np.flatnonzero(indexed.lengths[low:high])
        # Copied, as the index file's numbers are unaligned, and every search would copy them.
        places = indexed.pointers[low:high][filled] // indexed.dtype.itemsize
        bounds = np.searchsorted(filled, documents[first : last + 1] - low)
        numbers = filled + low  # of each sentence among the corpus's sequences
        counts = np.diff(bounds)
        limits = np.repeat(bounds[1:], counts)  # the end of each sentence's document
        goals = places + targets.of(numbers)
        ends = np.maximum(np.searchsorted(places, goals), np.arange(len(places)) + 2)
        ends = np.where(limits - ends < 2, limits, ends)  # of a sample that begins at each sentence
        cursors = bounds[:-1][counts >= 2]
        steps = [cursors[:0]]
        while len(cursors) > 0:  # a sample of each document at a step
            steps.append(cursors)
            reached = ends[cursors]
            cursors = reached[reached < limits[cursors]]
        begins = np.concatenate(steps)
        spans.append(np.stack([numbers[begins], numbers[ends[begins] - 1] + 1]))
        first = last
    begins, ends = np.concatenate(spans, axis=1)
    # Samples do not overlap, so sorting both alike keeps them together.
    return np.sort(begins), np.sort(ends)


@dataclass(frozen=True, eq=False)
class Pairs:
    """The two segments of each sample. Swapped: the first segment follows the second in the document.

    places   int64 [n, 2]  first token of each segment in the corpus
    lengths  int64 [n, 2]  tokens; at least 1
    swapped  bool [n]
    """

    places: Ids
    lengths: Ids
    swapped: NDArray[np.bool_]


def make_pairs(indexed: IndexedDataset, begins: Ids, ends: Ids, targets: Ids, states: Bits) -> Pairs:
    """Split each sample at a random sentence, swap with probability 1/2, shorten to its target.

    begins, ends, targets  int64 [n]; the first and the last sequence of a sample hold tokens
    states                 uint64 [n]: the samples' random streams, of which draws 0 to 3 are used
    """
    middles = begins + 1 + below(draw(states, 0), ends - begins - 1)
    begin_places, middle_places, last_places = (
        indexed.pointers[sequences] // indexed.dtype.itemsize for sequences in (begins, middles, ends - 1)
    )
    swapped = (draw(states, 1) >> np.uint64(63)).astype(bool)
    places = np.stack([begin_places, middle_places], axis=1)
    lengths = np.stack([middle_places, last_places + indexed.lengths[ends - 1]], axis=1) - places
    places[swapped], lengths[swapped] = places[swapped, ::-1], lengths[swapped, ::-1]
    shortened = shorten(lengths, targets)
    cuts = np.stack([draw(states, 2), draw(states, 3)], axis=1)
    # The kept part of a segment starts anywhere, uniformly.
    return Pairs(places + below(cuts, lengths - shortened + 1), shortened, swapped)


def shorten(lengths: Ids, targets: Ids) -> Ids:
    """Lengths [n, 2] after removing tokens one at a time from the longer segment (the second if equal).

    A segment below half of the target stays and the other is shortened; else both end at half.
    """
    first, second = lengths[:, 0], lengths[:, 1]
    excess = first + second > targets
    new_first = np.minimum(first, np.maximum(targets - second, (targets + 1) // 2))
    return np.where(excess[:, None], np.stack([new_first, targets - new_first], axis=1), lengths)
