"""The nearest valid setting."""

import pytest

from mlm.config.suggest import around, divisors, multiples_around, nearest

KEYS = ["model.hidden_size", "model.num_heads", "optimizer.lr", "data.path", "data.train", "train.steps"]


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("modle.hidden_size", "model.hidden_size"),
        ("hidden_size", "model.hidden_size"),
        ("lr", "optimizer.lr"),
        ("TRAIN.STEPS", "train.steps"),
        ("schedule.lr", "optimizer.lr"),
        ("optimizer.zzzz", None),
    ],
)
def test_nearest_finds_what_was_meant(typed: str, meant: str | None) -> None:
    assert nearest(typed, KEYS) == meant


def test_of_equally_near_ones_the_first_is_meant() -> None:
    assert nearest("torch", ["native", "hf", "torch_dist", "torchtitan"]) == "torch_dist"
    assert nearest("tensor_x", ["tensor_a", "tensor_b", "tensor_c", "tensor_d"]) == "tensor_a"


def test_longer_name_of_a_preset_is_nearer_than_a_similar_one() -> None:
    assert nearest("dgx_h100_80g", ["dgx_a100_80g", "dgx_h100", "dgx_h200"]) == "dgx_h100"


@pytest.mark.parametrize("value, expected", [(3, [2, 4]), (100, [16]), (0, [1])])
def test_around_names_one_below_and_one_above(value: int, expected: list[int]) -> None:
    assert around(value, divisors(16)) == expected


@pytest.mark.parametrize("value, expected", [(100, [64, 128]), (10, [64])])
def test_multiples_around_are_positive(value: int, expected: list[int]) -> None:
    assert multiples_around(value, 64) == expected
