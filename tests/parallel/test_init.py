"""Initial weights: the deviations of arXiv:1909.08053, section 4.1."""

import math

import pytest
import torch

from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.parallel.init import init_parameters
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import parameter_shards

LAYERS, HIDDEN = 8, 64


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
