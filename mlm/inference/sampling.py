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
"""Returned for a token whose logits are not finite."""
SHORT_LIST = 512
"""Most probable tokens that top_p tries before it sorts the vocabulary, which takes fifty times as long."""


def uniforms(seed: int, numbers: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Return draws in [0, 1) for the token at `positions[b]` of sequence `numbers[b]`: [B]."""
    return uniform(draw(draw(root(seed), np.array(numbers)), np.array(positions)))


def next_tokens(
    logits: Tensor,
    numbers: Sequence[int],
    positions: Sequence[int],
    options: Sampling,
    end_ids: Collection[int] = (),
    texts: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Return a token for each text from logits [B, V], which are overwritten; NOT_FINITE for NaN or infinity.

    `texts` holds the tokens of each text so far, prompt included: penalties need them. Of equal logits the
    lowest id is the most probable. `end_ids` are not drawn before min_new_tokens.
    """
    penalty, size = options.repetition_penalty, options.no_repeat_ngram_size
    for row, text in zip(logits, texts, strict=penalty != 1 or size > 0):
        if penalty != 1:
            # Keskar et al. 2019 (arXiv:1909.05858), section 4.1; for logits below 0 as `transformers` does
            ids = torch.tensor(sorted(set(text)))
            row[ids] = torch.where(row[ids] > 0, row[ids] / penalty, row[ids] * penalty)
        if size:
            # tokens with which the last `size` tokens would occur a second time
            start = text[max(0, len(text) - size + 1) :]
            windows = range(len(text) - size + 1)
            repeats = {text[n + size - 1] for n in windows if text[n : n + size - 1] == start}
            if len(repeats) < len(row):
                row[list(repeats)] = -math.inf
    early = [[row] for row, position in enumerate(positions) if position < options.min_new_tokens]
    if early and end_ids:
        logits[torch.tensor(early), torch.tensor(list(end_ids))] = -math.inf
    best = logits.argmax(-1)  # the index of a NaN, if there is one
    peaks = logits.gather(1, best.unsqueeze(1)).squeeze(1)
    tokens = best.tolist()
    if options.temperature:
        chances = uniforms(options.seed, numbers, positions).tolist()
        tokens = [choose(row, chance, options) for row, chance in zip(logits, chances, strict=True)]
    choices = zip(tokens, peaks.isfinite().tolist(), strict=True)
    return [token if finite else NOT_FINITE for token, finite in choices]


def choose(logits: Tensor, chance: float, options: Sampling) -> int:
    """Return the token of logits [V] at which the probabilities, summed by id in float64, pass `chance`.

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
            before = largest.cumsum(-1) - largest  # mass of more probable tokens: 0 for the best
            enough = int((before < options.top_p).sum())
            if enough < count:
                break
        p, indices = largest[:enough], indices[:enough]
        ids = indices if ids is None else ids[indices]
    if ids is not None:
        ids, order = ids.sort()
        p = p[order]
    sums = p.cumsum(-1)
    index = int(torch.searchsorted(sums, chance * float(sums[-1]), right=True))
    index = min(index, int(p.nonzero()[-1])) if index >= len(p) else index
    return index if ids is None else int(ids[index])
