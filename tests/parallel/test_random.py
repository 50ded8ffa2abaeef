"""Random numbers are functions of their place: any slice, any order, any rank."""

import math

import pytest
import torch

from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.parallel.mesh import Axis
from mlm.parallel.random import derive_seed, draw_normal, init_parameters
from mlm.parallel.sharding import parameter_shards

LAYERS, HIDDEN = 8, 64


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


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_weights_into_the_residual_stream_are_scaled_by_the_depth(kind: str) -> None:
    """0.02 everywhere, 0.02 / sqrt(2L) in attention.out and mlp.down; 4,096 numbers give it to 4 %."""
    config = ModelConfig(
        kind=kind,  # type: ignore[arg-type]
        token_types=2 if kind == "bert" else 0,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_heads=4,
        max_positions=64,
        vocab_size=64,
        vocab_multiple=1,
    )
    model = family_of(config.kind).model(config, tp=Axis("tp"), dtype=torch.float32)
    init_parameters(model, 5, Axis("tp"))
    for shard in parameter_shards(model, Axis("tp")):
        value = shard.parameter.detach()
        if value.dim() < 2:
            expected = 0.0 if shard.name.endswith("bias") else 1.0
            assert torch.equal(value, torch.full_like(value, expected)), shard.name
        elif value.numel() >= HIDDEN * HIDDEN:
            into_stream = shard.name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * LAYERS) if into_stream else 0.02
            assert value.square().mean().sqrt().item() == pytest.approx(std, rel=0.04), shard.name
