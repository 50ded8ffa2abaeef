"""Regions: meeting and tiling, against a tensor that counts how often each element is held."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlm.checkpoint.native.slices import Region
from tests.checkpoint.native.helpers import tiling_of

SHAPE = (3, 4)
spans = [
    st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda s, n=n: sum(s) <= n) for n in SHAPE
]
regions = st.tuples(*spans).map(lambda ab: Region(*zip(*ab, strict=True)))


def counted(pieces: list[Region]) -> torch.Tensor:
    count = torch.zeros(SHAPE, dtype=torch.int64)
    for piece in pieces:
        count[piece.within(Region((0, 0), SHAPE))] += 1
    return count


@given(st.lists(regions, max_size=4))
def test_tiling_problem_is_none_only_if_each_element_is_held_once(pieces: list[Region]) -> None:
    assert (tiling_of(SHAPE, pieces) is None) == bool((counted(pieces) == 1).all())


@given(regions, regions)
def test_intersection_is_the_elements_of_both(a: Region, b: Region) -> None:
    both = a.intersect(b)
    assert torch.equal(counted([both]) if both else counted([]), (counted([a, b]) == 2).long())


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3)])
def test_whole_tensor_tiles_itself(shape: tuple[int, ...]) -> None:
    whole = Region((0,) * len(shape), shape)
    assert tiling_of(shape, [whole] if whole.volume else []) is None


def test_two_scalars_overlap() -> None:
    assert "overlap" in str(tiling_of((), [Region((), ()), Region((), ())]))


def test_piece_outside_the_shape_is_a_problem() -> None:
    assert "not inside" in str(tiling_of((4,), [Region((2,), (4,))]))
