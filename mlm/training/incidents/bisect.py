"""Search for the samples of a step that cause an incident, by computing the step with halves of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mlm.data.sampler import Batch
from mlm.parallel.labels import IGNORE

Score = Callable[[Sequence[int]], float]
"""Badness of a step with only these samples: infinite if not finite, else its gradient norm."""


def bisect(samples: Sequence[int], score: Score) -> tuple[list[int], int]:
    """Return the smallest set of samples found that keeps the step as bad, and the steps computed.

    Of two halves the worse one is kept; where the whole is not finite and neither half is, the whole.
    """
    kept, computed = list(samples), 0
    whole_is_infinite = score(kept) == float("inf")
    while len(kept) > 1:
        half = len(kept) // 2
        halves = [kept[:half], kept[half:]]
        scores = [score(part) for part in halves]
        computed += 2
        if whole_is_infinite and max(scores) < float("inf"):
            break
        kept = halves[scores.index(max(scores))]
    return kept, computed


def with_only(batches: Sequence[Batch], kept: Sequence[int]) -> list[Batch]:
    """Return micro-batches of the same shape in which all other samples are neutral: token 0, not scored."""
    found, wanted = [], set(kept)
    for batch in batches:
        rows = torch.tensor([batch.first_sample + row in wanted for row in range(len(batch.tokens))])
        mask = rows[:, None].expand_as(batch.tokens)
        tokens = torch.where(mask, batch.tokens, 0)
        found.append(replace(batch, tokens=tokens, labels=torch.where(mask, batch.labels, IGNORE)))
    return found
