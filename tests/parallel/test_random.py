"""Random numbers are functions of their place: any slice, any order, any rank."""

import pytest
import torch

from mlm.parallel.random import derive_seed, draw_normal


@pytest.mark.parametrize("shape", [(7, 3), (1000, 600), (3, 300_000), (5,)])
def test_draw_normal_rows_are_slices_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = draw_normal(shape, 0.02, seed=5)
    for rows in (range(0, 1), range(1, 3), range(shape[0] // 2, shape[0]), range(2, 2)):
        assert torch.equal(draw_normal(shape, 0.02, seed=5, rows=rows), whole[rows.start : rows.stop])


def test_draw_normal_has_the_asked_deviation() -> None:
    """10^6 draws: the sample deviation's own standard error is std / sqrt(2e6), 0.07 %."""
    x = draw_normal((1000, 1000), 0.02, seed=1)
    assert abs(x.std().item() / 0.02 - 1) < 0.005
    assert abs(x.mean().item()) < 1e-4


def test_derive_seed_tells_places_apart() -> None:
    places = [(1,), (2,), (1, 2), (2, 1), (1, "a"), (1, "b"), ("a", 1), (1, -1)]
    assert len({derive_seed(*p) for p in places}) == len(places)
    assert all(0 <= derive_seed(*p) < 2**63 for p in places)
