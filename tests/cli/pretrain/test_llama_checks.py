"""Settings of Llamas that no run can have: each is one line with key, value and fix."""

import pytest

from mlm.cli.compose.composition import load_config
from mlm.runs.checks import check_pretrain

TINY = ["model=llama_tiny", "data=synthetic"]
WIDE = ["model.num_heads=12", "model.hidden_size=96", "model.ffn_hidden_size=192"]
"""Twelve heads; three of keys and values are added below."""


def problems_of(*words: str) -> list[str]:
    """The problems of a run of the tiny Llama."""
    config = load_config("pretrain", [*TINY, *words])
    return list(check_pretrain(config, world_size=None, local_devices=None))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["model.options.rope_scaling=dynamic"],
            "model.options.rope_scaling=dynamic is no scaling of ours; use default, linear, llama3 or yarn",
        ),
        (
            ["model.options.num_kv_heads=3"],
            "model.options.num_kv_heads=3 does not divide model.num_heads=4; "
            "use model.options.num_kv_heads=2",
        ),
        (
            [*WIDE, "model.options.num_kv_heads=3", "tp=2"],
            "of tp=2 and model.options.num_kv_heads=3 neither divides the other; use tp=1 or tp=3",
        ),
        (
            ["tp=8"],
            "tp=8 does not divide model.num_heads=4; use tp=4 (its divisors: 1, 2, 4)",
        ),
        (
            ["cp=2", "data.seq_length=126"],
            "cp=2 splits sequences into 4 pieces, but 4 does not divide data.seq_length=126; "
            "use data.seq_length=124 or data.seq_length=128",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistake_has_its_fix(words: list[str], problem: str) -> None:
    assert problems_of(*words) == [problem]


@pytest.mark.parametrize("words", [["cp=8"], [*WIDE, "model.options.num_kv_heads=3", "tp=6"]], ids=" ".join)
def test_ranks_may_be_more_than_heads_of_keys(words: list[str]) -> None:
    """cp splits no heads, and tp replicates those that it has too few of."""
    assert problems_of(*words) == []
