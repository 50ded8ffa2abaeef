"""Random numbers and dropout masks are functions of names, samples and sites: any slice, order and rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.parallel import dropout
from mlm.parallel.dropout import DropoutStream, draw_keep_mask, dropped_steps, sample_keys, site_keys
from mlm.parallel.random import draw_normal


@pytest.mark.parametrize("shape", [(1000, 600), (3, 300_000), (5,)])
def test_draw_normal_rows_are_slices_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = draw_normal(shape, 0.02, seed=5)
    for rows in (range(0, 1), range(1, 3), range(shape[0] // 2, shape[0]), range(2, 2)):
        assert torch.equal(draw_normal(shape, 0.02, seed=5, rows=rows), whole[rows.start : rows.stop])


def test_draw_normal_has_the_asked_deviation() -> None:
    """10^6 draws: the sample deviation's own standard error is std / sqrt(2e6), 0.07 %."""
    x = draw_normal((1000, 1000), 0.02, seed=1)
    assert abs(x.std().item() / 0.02 - 1) < 0.005
    assert abs(x.mean().item()) < 1e-4


CPU = torch.device("cpu")
S, B, H, HEADS = 8, 4, 6, 4
PLACES = site_keys([(0, "attention"), (0, "attention out")])


def of(seed: int = 1, sample: int = 0, samples: int = B, sequence_rank: int = 0) -> DropoutStream:
    return DropoutStream.of_micro_batch(seed, sample, samples, CPU, sequence_rank=sequence_rank)


def hidden(stream: DropoutStream, place: Tensor = PLACES[1], rows: int = S) -> Tensor:
    return stream.hidden(torch.ones(rows, len(stream.keys), H), 0.5, place)


def probabilities(stream: DropoutStream, heads: int = HEADS, **where: Any) -> Tensor:
    x = torch.ones(len(stream.keys) * heads, S, S)
    return stream.probabilities(x, 0.5, PLACES[0], length=S, **where).view(-1, heads, S, S)


def test_masks_differ_by_layer_site_sample_and_seed() -> None:
    masks = [hidden(of()), hidden(of(), site_keys([(1, "attention out")])[0]), hidden(of(), PLACES[0])]
    masks += [hidden(of(2)), hidden(of(sample=8))]
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 5
    assert torch.equal(masks[0], hidden(of()))


def test_a_mask_belongs_to_its_sample_at_every_micro_batch_size() -> None:
    pairs = [of(sample=first, samples=2) for first in (0, 2)]
    assert torch.equal(hidden(of()), torch.cat([hidden(pair) for pair in pairs], dim=1))
    assert torch.equal(probabilities(of()), torch.cat([probabilities(pair) for pair in pairs]))


def test_ranks_draw_their_rows_and_heads_of_one_mask() -> None:
    ranks = [hidden(of(sequence_rank=rank), rows=S // 2) for rank in (0, 1)]
    assert torch.equal(hidden(of()), torch.cat(ranks))
    heads = [probabilities(of(), HEADS // 2, first_head=rank * HEADS // 2) for rank in (0, 1)]
    assert torch.equal(probabilities(of()), torch.cat(heads, dim=1))


def test_documents_of_a_sample_have_masks_of_their_own() -> None:
    first, second = (
        of().probabilities(torch.ones(HEADS, 3, 3), 0.5, PLACES[0], length=S, first_row=row, sample=1)
        for row in (0, 3)
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize("chunk", [1, 10, 1 << 17])
@pytest.mark.parametrize("width", [1, 5])
def test_chunks_and_single_hashes_give_the_same_bits(
    chunk: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is what torch.compile makes one kernel of."""
    monkeypatch.setattr(dropout, "CHUNK", chunk)
    rows, keys = torch.arange(7, dtype=torch.int32)[:, None], sample_keys(3, 0, 2)[None]
    found = draw_keep_mask(rows, keys, width, 0.3, 9)
    assert found.shape == (7, 2, width)
    columns = torch.arange(width, dtype=torch.int32)
    assert torch.equal(found, dropout._keep_elements(rows, keys, columns, 0.3, 5))


def test_the_hash_is_murmur_s_on_unsigned_numbers() -> None:
    """Against integers of Python, whose shifts repeat no sign."""

    def mix(x: int, keys: tuple[int, int]) -> int:
        x ^= keys[0]
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x ^= keys[1]
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    keys = sample_keys(7, 3, 1)
    bits = dropout._mix(torch.arange(-500, 500, dtype=torch.int32)[:, None], keys)
    wanted = [mix(x % 2**32, tuple(k % 2**32 for k in keys[0].tolist())) for x in range(-500, 500)]
    assert [b % 2**32 for b in bits.flatten().tolist()] == wanted


@pytest.mark.parametrize("p", [0.1, 0.9999999, 1e-7])
def test_dropout_keeps_the_mean_and_drops_that_share(p: float) -> None:
    """2^20 ones, within 6 standard errors; the mean is exact where nothing is dropped."""
    share = dropped_steps(p) / 2**16
    assert abs(share - p) <= 2**-16
    y = of(samples=1).hidden(torch.ones(1 << 10, 1, 1 << 10), p, PLACES[0])
    error = 6 * (share / (1 - share)) ** 0.5 / 1024
    assert abs(y.mean().item() - 1) <= error
    assert set(y.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - share)).item()}


def test_neighbours_samples_and_places_are_uncorrelated() -> None:
    """Correlations of 2^18 pairs of masks stay within 5 standard errors of 0."""
    n = 1 << 9
    streams = of(samples=2).keys, of(samples=2, sample=1 << 30).keys
    masks = [
        draw_keep_mask(torch.arange(n, dtype=torch.int32), (keys[i] ^ place), n, 0.5).double() - 0.5
        for keys in streams
        for i in range(2)
        for place in PLACES
    ]
    shifted = [masks[0].roll(by, dims=dim) for dim in (0, 1) for by in (1, 2, 16)]
    for other in (*masks[1:], *shifted):
        assert abs((masks[0] * other).mean().item()) * 4 < 5 / n
