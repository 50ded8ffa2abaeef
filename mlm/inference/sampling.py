"""Choice of the next token: greedy (the most probable), or sampled by temperature, top_k and top_p.

A draw is a function of (seed, prompt number, position in its continuation) alone: batch and layout change
only the rounding of the logits.

Shapes: B texts, V vocabulary.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlm.inference.config import Sampling
from mlm.util.splitmix import draw, root, uniform

NOT_FINITE = -1
"""In place of a token where the logits are not finite."""
SHORT_LIST = 512
"""Tokens that top_p considers before it sorts the vocabulary, which takes fifty times as long."""


def uniforms(seed: int, numbers: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Draws in [0, 1) of sequences `numbers[b]` for their tokens at `positions[b]`."""
    return uniform(draw(draw(root(seed), np.array(numbers)), np.array(positions)))


def next_tokens(
    logits: Tensor,
    numbers: Sequence[int],
    positions: Sequence[int],
    options: Sampling,
    eod_id: int | Collection[int] | None,
    texts: Sequence[Sequence[int]] = (),
) -> list[int]:
    """A token for each text from logits [B, V], which are overwritten; NOT_FINITE where they are not finite.

    `texts` holds the tokens of each text so far, prompt included, for the options that look at them. Of equal
    logits the one with the lowest id is the most probable.
    """
    penalty, size = options.repetition_penalty, options.no_repeat_ngram_size
    for row, text in zip(logits, texts, strict=penalty != 1 or size > 0):
        if penalty != 1:
            # Keskar et al. 2019 (arXiv:1909.05858), section 4.1; for logits below 0 as `transformers` does
            ids = torch.tensor(sorted(set(text)))
            row[ids] = torch.where(row[ids] > 0, row[ids] / penalty, row[ids] * penalty)
        if size:
            # tokens after which the last `size` tokens would occur twice
            start = text[max(0, len(text) - size + 1) :]
            windows = range(len(text) - size + 1)
            repeats = {text[n + size - 1] for n in windows if text[n : n + size - 1] == start}
            if len(repeats) < len(row):
                row[list(repeats)] = -math.inf
    if (ends := list(end_tokens(eod_id))) and any(
        position < options.min_new_tokens for position in positions
    ):
        early = torch.tensor([position < options.min_new_tokens for position in positions])
        logits[early.nonzero(), torch.tensor(ends)] = -math.inf
    best = logits.argmax(-1)  # a NaN's, if there is one
    peaks = logits.gather(1, best.unsqueeze(1)).squeeze(1)
    tokens = best.tolist()
    if options.temperature:
        chances = uniforms(options.seed, numbers, positions).tolist()
        tokens = [choose(row, chance, options) for row, chance in zip(logits, chances, strict=True)]
    choices = zip(tokens, peaks.isfinite().tolist(), strict=True)
    return [token if finite else NOT_FINITE for token, finite in choices]


def end_tokens(eod_id: int | Collection[int] | None) -> Collection[int]:
    """Return the tokens that end a text, given as one, several, or None."""
    return () if eod_id is None else (eod_id,) if isinstance(eod_id, int) else eod_id


def choose(logits: Tensor, chance: float, options: Sampling) -> int:
    """The token of [V] where the summed probabilities, in the order of ids, pass `chance`, in float64.

    top_k applies first, then top_p to the remaining tokens.
    """
    x = logits.double()
    x = (x - x.max()) / options.temperature  # 0 at the best: a tiny temperature overflows to -inf elsewhere
    ids: Tensor | None = None
    if 0 < options.top_k < len(x):
        x, ids = x.topk(options.top_k)
    p = torch.softmax(x, -1)
    if options.top_p < 1:
        for count in (min(SHORT_LIST, len(p)), len(p)):
            largest, indices = p.topk(count)
            before = largest.cumsum(-1) - largest  # mass of the better ones: none before the best
            enough = int((before < options.top_p).sum())
            if enough < count:
                break
        p, kept = largest[:enough], indices[:enough]
        ids = kept if ids is None else ids[kept]
    if ids is not None:
        ids, order = ids.sort()
        p = p[order]
    sums = p.cumsum(-1)
    index = int(torch.searchsorted(sums, chance * float(sums[-1]), right=True))
    index = min(index, int(p.nonzero()[-1])) if index >= len(p) else index
    return index if ids is None else int(ids[index])
