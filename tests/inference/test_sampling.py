"""Sampling: which tokens may be drawn, their frequencies, and the inputs a draw depends on."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mlm.inference.config import Sampling
from mlm.inference.sampling import NOT_FINITE, SHORT_LIST, choose, next_tokens, uniforms

PLAIN = Sampling(temperature=1.0)
LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0])  # probabilities 0.03, 0.64, 0.24, 0.09
EOD = 1


def drawn(**changes: Any) -> set[int]:
    """Every token that 300 draws give."""
    options = replace(PLAIN, **changes)
    return {next_tokens(LOGITS.clone().unsqueeze(0), [0], [place], options)[0] for place in range(300)}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, {0, 1, 2, 3}),
        ({"temperature": 0.0}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.6}, {1}),
        ({"top_p": 0.7}, {1, 2}),
        ({"top_k": 3, "top_p": 0.95}, {1, 2, 3}),
        ({"top_k": 2, "top_p": 0.72}, {1}),  # 0.73 of what top_k leaves
        ({"top_p": 1e-9}, {1}),  # the best one always stays
        ({"temperature": 1e-308}, {1}),
    ],
)
def test_only_the_tokens_asked_for_are_drawn(changes: dict[str, Any], tokens: set[int]) -> None:
    assert drawn(**changes) == tokens


def reference(logits: NDArray[np.float32], chance: float, options: Sampling) -> int:
    """The definition, in float64: sort, cut, and walk through what is left in the order of ids."""
    x = logits.astype(np.float64) / options.temperature
    order = sorted(range(len(x)), key=lambda i: -x[i])[: options.top_k or None]
    p = np.exp(x[order] - x.max())
    p /= p.sum()
    kept, mass = [], 0.0
    for token, probability in zip(order, p.tolist(), strict=True):
        kept.append((token, probability))
        mass += probability
        if mass >= options.top_p:
            break
    left = chance * sum(probability for _, probability in kept)
    for token, probability in sorted(kept):
        if left < probability:
            return token
        left -= probability
    return max(kept)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_k": 300, "top_p": 0.5, "temperature": 1.3},
        {"temperature": 5.0, "top_p": 0.95},  # so flat that the short list does not reach top_p
    ],
)
def test_draws_equal_a_reference_in_float64(changes: dict[str, Any]) -> None:
    options, size = replace(PLAIN, **changes), 3 * SHORT_LIST
    logits = torch.randn(40, size, generator=torch.Generator().manual_seed(0)) * 2
    chances = uniforms(3, range(40), [0] * 40).tolist()
    got = [choose(row, chance, options) for row, chance in zip(logits, chances, strict=True)]
    assert got == [reference(r, c, options) for r, c in zip(logits.numpy(), chances, strict=True)]


def test_tokens_are_drawn_as_often_as_softmax_says() -> None:
    """Chi-square over 20,000 draws of 4 tokens: 16.27 is passed once in 1,000 seeds."""
    count, options = 5000, replace(PLAIN, temperature=0.8, seed=11)
    rows = LOGITS.expand(4, -1)
    seen = np.zeros(4)
    for place in range(count):
        for token in next_tokens(rows.clone(), range(4), [place] * 4, options):
            seen[token] += 1
    expected = torch.softmax(LOGITS.double() / 0.8, -1).numpy() * seen.sum()
    assert ((seen - expected) ** 2 / expected).sum() < 16.27


def test_a_draw_is_a_function_of_seed_text_and_place() -> None:
    alone = [float(uniforms(7, [text], [place])[0]) for text in (0, 5) for place in (0, 1)]
    assert uniforms(7, [0, 0, 5, 5], [0, 1, 0, 1]).tolist() == alone
    assert len({*alone, *uniforms(8, [0, 0, 5, 5], [0, 1, 0, 1]).tolist()}) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_is_not_drawn_before_min_new_tokens(temperature: float) -> None:
    options = replace(PLAIN, temperature=temperature, top_k=1, min_new_tokens=2)
    rows = LOGITS.expand(3, -1).clone()
    assert next_tokens(rows, [0, 0, 0], [0, 1, 2], options, [EOD]) == [2, 2, EOD]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_distinguished_from_tokens(temperature: float, value: float) -> None:
    rows = LOGITS.expand(2, -1).clone()
    rows[1, 3] = value
    found = next_tokens(rows, [0, 1], [0, 0], replace(PLAIN, temperature=temperature, top_k=1))
    assert found == [1, NOT_FINITE]


@pytest.mark.parametrize(("size", "token"), [(0, 1), (1, 3), (2, 2), (3, 2), (4, 1)])
def test_no_n_gram_occurs_twice(size: int, token: int) -> None:
    """By probability the tokens are 1, 2, 3, 0; the text ends with 1, 0 1 and 1 0 1."""
    options = replace(PLAIN, temperature=0.0, no_repeat_ngram_size=size)
    text = [2, 0, 1, 1, 0, 1]
    assert next_tokens(LOGITS.clone().unsqueeze(0), [0], [0], options, (), [text]) == [token]


def test_a_text_that_holds_every_token_repeats_one_and_of_equal_ones_the_lowest_is_taken() -> None:
    greedy = replace(PLAIN, temperature=0.0, no_repeat_ngram_size=1)
    for row, token in ((LOGITS.clone(), 1), (torch.tensor([0.0, 2.0, 2.0, 1.0]), 1)):
        assert next_tokens(row.unsqueeze(0), [0], [0], greedy, (), [range(4)]) == [token]
