"""Regions: meeting and tiling, against a tensor that counts how often each element is held."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mlm.checkpoint.native.slices import Region

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


@given(regions, regions)
def test_intersection_is_the_elements_of_both(a: Region, b: Region) -> None:
    both = a.intersect(b)
    assert torch.equal(counted([both]) if both else counted([]), (counted([a, b]) == 2).long())
