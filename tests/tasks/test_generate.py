"""Sampling: which tokens may be drawn, when a text ends, and how it is printed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlm.config.task_schema import GenerateConfig
from mlm.parallel.mesh import shape_context
from mlm.tasks.generate import NextLogits, Stream, choose, sample

CONFIG = GenerateConfig(ckpt="unused", prompt="unused", temperature=1.0)
LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0])  # probabilities 0.03, 0.64, 0.24, 0.09
EOD = 1


def drawn(**changes: Any) -> set[int]:
    """Every token that 300 draws give."""
    generator = torch.Generator().manual_seed(0)
    return {choose(LOGITS.clone(), replace(CONFIG, **changes), generator) for _ in range(300)}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, {0, 1, 2, 3}),
        ({"temperature": 0.0}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.6}, {1}),
        ({"top_p": 0.7}, {1, 2}),
        ({"top_p": 1e-9}, {1}),  # the best one always stays
        ({"temperature": 1e-3}, {1}),
    ],
)
def test_only_the_tokens_asked_for_are_drawn(changes: dict[str, Any], tokens: set[int]) -> None:
    assert drawn(**changes) == tokens


def fake_model(contexts: list[int]) -> NextLogits:
    """A model of 3 positions that always prefers the end of the document; notes how much it read."""

    def last_logits(tokens: torch.Tensor, x: None) -> torch.Tensor:
        contexts.append(tokens.shape[1])
        return LOGITS.clone().unsqueeze(0)

    def evaluate(batches: Any, forward: Any) -> Any:
        return [(batch, forward(SimpleNamespace(last_logits=last_logits), batch, None)) for batch in batches]

    model: Any = SimpleNamespace(vocab_size=len(LOGITS), evaluate=evaluate)
    return NextLogits(model, 3, shape_context())


@pytest.mark.parametrize(("least", "expected"), [(0, []), (4, [2, 2, 2, 2])])
def test_a_text_ends_at_its_end_token_but_not_before_min_new_tokens(least: int, expected: list[int]) -> None:
    config = replace(CONFIG, temperature=0.0, max_new_tokens=9, min_new_tokens=least)
    assert list(sample(fake_model([]), [0], config, EOD)) == expected


def test_the_context_is_the_last_max_positions_tokens() -> None:
    contexts: list[int] = []
    config = replace(CONFIG, temperature=0.0, max_new_tokens=5, min_new_tokens=5)
    list(sample(fake_model(contexts), [0, 0], config, EOD))
    assert contexts == [2, 3, 3, 3, 3]


def test_a_character_split_over_tokens_is_printed_once_it_is_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = {(): "", (0,): "a", (0, 1): "a\ufffd", (0, 1, 2): "aé"}
    stream = Stream(SimpleNamespace(decode=lambda ids: parts[tuple(ids)]), shown=True)  # type: ignore[arg-type]
    said = []
    for token in (0, 1, 2):
        stream.add([token])
        said.append(capsys.readouterr().out)
    assert said == ["a", "", "é"]
