"""Choice of the next token: greedy (the most probable), or sampled by temperature, top_k and top_p.

A draw is a function of (seed, prompt number, position in its continuation) alone: what shares the batch and
how the model is split change nothing but the rounding of the logits.

Shapes: B texts, V vocabulary.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlm.util.errors import Problem
from mlm.util.splitmix import draw, root, uniform

NOT_FINITE = -1
"""In place of a token where the logits are no numbers."""
SHORT_LIST = 512
"""Tokens that top_p considers before it sorts the whole vocabulary, which takes fifty times as long."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings; see GenerateConfig for the meaning of each number."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 1234
    batch_size: int = 8
    """Sequences generated at a time. When one ends, the next takes its place."""

    def problems(self) -> list[Problem]:
        """Return the problem of each value of another type, else of each that is out of range."""
        numbers = {each.name: (Integral if type(each.default) is int else Real) for each in fields(self)}
        nouns = {Integral: "an integer", Real: "a number"}
        if wrong := [key for key, kind in numbers.items() if not isinstance(getattr(self, key), kind)]:
            return [Problem.at(key, getattr(self, key), f"must be {nouns[numbers[key]]}") for key in wrong]
        most = self.max_new_tokens
        rules: tuple[tuple[str, bool, str], ...] = (
            ("max_new_tokens", most >= 1, "must be at least 1"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= most, f"must be 0 to max_new_tokens={most}"),
            ("temperature", 0 <= self.temperature < math.inf, "must be finite and 0 or more"),
            ("top_k", self.top_k >= 0, "must be 0 or more"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "must be above 0"),
            ("batch_size", self.batch_size >= 1, "must be at least 1"),
            ("seed", 0 <= self.seed < 1 << 63, "must be 0 to 2^63 - 1"),
        )
        return [Problem.at(key, getattr(self, key), problem) for key, holds, problem in rules if not holds]


def declared_sampling(generation: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the sampling settings of a generation_config.json as `transformers` reads it.

    One that says nothing of `do_sample` declares no temperature; sampling without a top_k takes 50.
    """
    usual = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    draws, kinds = generation.get("do_sample"), {"top_k": Integral}
    said: dict[str, Any] = {"temperature": 0.0} if draws is False else usual if draws is True else {}
    names = (*(usual if draws is True else ()), "repetition_penalty")
    found = {
        name: generation[name] for name in names if isinstance(generation.get(name), kinds.get(name, Real))
    }
    return said | found


def as_declared(generation: Mapping[str, Any], typed: Mapping[str, Any]) -> Sampling:
    """Return sampling settings: those that are typed and not None, else declared, else the usual ones."""
    return Sampling(
        **declared_sampling(generation) | {key: value for key, value in typed.items() if value is not None}
    )


def uniforms(seed: int, numbers: Sequence[int], places: Sequence[int]) -> NDArray[np.float64]:
    """In [0, 1), one for each sequence: the draw of sequence `numbers[b]` for the token at `places[b]`."""
    return uniform(draw(draw(root(seed), np.array(numbers)), np.array(places)))


def next_tokens(
    logits: Tensor,
    numbers: Sequence[int],
    places: Sequence[int],
    options: Sampling,
    eod_id: int | Collection[int] | None,
    seen: Sequence[Collection[int]] = (),
) -> list[int]:
    """A token for each text from logits [B, V], which are overwritten; NOT_FINITE where they are no numbers.

    `seen` holds the tokens of each text that options.repetition_penalty is for. Of equal logits the one with
    the lowest id is the most probable.
    """
    if options.repetition_penalty != 1:
        for row, tokens in zip(logits, seen, strict=True):
            penalise(row, tokens, options.repetition_penalty)
    if (ends := list(end_tokens(eod_id))) and any(place < options.min_new_tokens for place in places):
        early = torch.tensor([place < options.min_new_tokens for place in places])
        logits[early.nonzero(), torch.tensor(ends)] = -math.inf
    best = logits.argmax(-1)  # of a NaN, where there is one
    peaks = logits.gather(1, best.unsqueeze(1)).squeeze(1)
    tokens = best.tolist() if options.temperature == 0 else _drawn(logits, numbers, places, options)
    choices = zip(tokens, peaks.isfinite().tolist(), strict=True)
    return [token if finite else NOT_FINITE for token, finite in choices]


def end_tokens(eod_id: int | Collection[int] | None) -> Collection[int]:
    """Return the tokens that end a text, given as one, several, or None."""
    return () if eod_id is None else (eod_id,) if isinstance(eod_id, int) else eod_id


def penalise(logits: Tensor, tokens: Collection[int], penalty: float) -> None:
    """Make tokens less probable in [V]: logits above 0 divided by the penalty, others multiplied by it.

    Source: Keskar et al. 2019 (arXiv:1909.05858), section 4.1; for logits below 0 as `transformers` does.
    """
    ids = torch.tensor(sorted(tokens))
    chosen = logits[ids]
    logits[ids] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)


def _drawn(logits: Tensor, numbers: Sequence[int], places: Sequence[int], options: Sampling) -> list[int]:
    chances = uniforms(options.seed, numbers, places).tolist()
    return [choose(row, chance, options) for row, chance in zip(logits, chances, strict=True)]


def choose(logits: Tensor, chance: float, options: Sampling) -> int:
    """The token of [V] where the summed probabilities, in the order of ids, pass `chance`, in float64.

    top_k first, then top_p of what that leaves.
    """
    x = logits.double()
    x = (x - x.max()) / options.temperature  # 0 at the best: a tiny temperature overflows to -inf elsewhere
    ids: Tensor | None = None
    if 0 < options.top_k < len(x):
        x, ids = x.topk(options.top_k)
    p = torch.softmax(x, -1)
    if options.top_p < 1:
        p, kept = nucleus(p, options.top_p)
        ids = kept if ids is None else ids[kept]
    if ids is not None:
        ids, order = ids.sort()
        p = p[order]
    sums = p.cumsum(-1)
    place = int(torch.searchsorted(sums, chance * float(sums[-1]), right=True))
    place = min(place, int(p.nonzero()[-1])) if place >= len(p) else place
    return place if ids is None else int(ids[place])


def nucleus(p: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest largest of the probabilities [V] that sum to top_p, and their places. One at least."""
    for count in (min(SHORT_LIST, len(p)), len(p)):
        largest, places = p.topk(count)
        before = largest.cumsum(-1) - largest  # mass of the better ones: none before the best
        enough = int((before < top_p).sum())
        if enough < count or count == len(p):
            break
    return largest[:enough], places[:enough]
