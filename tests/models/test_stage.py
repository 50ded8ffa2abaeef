"""Assignment of layers to stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm.models.stage import split_layers


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (6, 4, [1, 2, 2, 1]), (5, 2, [3, 2]), (3, 1, [3])],
)
def test_embedding_and_head_stages_get_fewer(layers: int, stages: int, counts: list[int]) -> None:
    assert [len(s.layers) for s in split_layers(layers, stages)] == counts


@given(st.integers(1, 64), st.integers(0, 64))
def test_every_layer_is_in_one_stage_in_order(stages: int, more: int) -> None:
    split = split_layers(stages + more, stages)
    assert [n for s in split for n in s.layers] == list(range(stages + more))
    sizes = [len(s.layers) for s in split]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert [s.is_first for s in split] == [True] + [False] * (stages - 1)
    assert [s.is_last for s in split] == [False] * (stages - 1) + [True]


def test_more_stages_than_layers_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"num_layers=3 .* 4 stages"):
        split_layers(3, 4)
