"""Random numbers are functions of their place: any slice, any order, any rank."""

import pytest
import torch

from mlm.parallel.random import DropoutStream, derive_seed, draw_normal, dropout

CPU = torch.device("cpu")


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


def masked(stream: DropoutStream, layer: int = 0, site: str = "residual") -> torch.Tensor:
    return stream.hidden(torch.ones(8, 4, 4), 0.5, layer, site)


def of(seed: int = 1, sample: int = 0, **parts: tuple[int, ...]) -> DropoutStream:
    return DropoutStream.of_micro_batch(seed, sample, CPU, **parts)


def test_dropout_masks_differ_by_layer_site_sample_seed_and_rank() -> None:
    masks = [masked(of()), masked(of(), 1), masked(of(), 0, "embedding"), masked(of(2)), masked(of(sample=8))]
    masks += [masked(of(hidden_parts=(rank,))) for rank in (0, 1)]
    assert len({tuple(m.flatten().tolist()) for m in masks}) == 7


def test_the_same_place_has_the_same_mask() -> None:
    assert torch.equal(masked(of()), masked(of()))


def test_one_process_can_draw_what_two_ranks_would() -> None:
    """Sequence parallelism: each rank drops among its own rows."""
    x, both = torch.rand(8, 4, 4), of(hidden_parts=(0, 1))
    ranks = [of(hidden_parts=(rank,)).hidden(x.chunk(2)[rank], 0.5, 3, "mlp out") for rank in (0, 1)]
    assert torch.equal(both.hidden(x, 0.5, 3, "mlp out"), torch.cat(ranks))


def test_dropout_keeps_the_mean() -> None:
    """2^20 ones, a quarter dropped, the rest scaled up: mean 1 within 6 standard errors."""
    y = dropout(torch.ones(1 << 20), 0.25)
    assert abs(y.mean().item() - 1) < 6 * (0.25 / 0.75) ** 0.5 / 1024
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
