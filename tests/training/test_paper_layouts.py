"""The papers' largest layouts, any rank of them, on the meta device with a fake process group."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mlm.cli.compose.composition import load_config
from mlm.data.sampler import Batch
from mlm.models.gpt2.model import NextToken
from mlm.models.shape import count_parameters
from mlm.parallel.mesh import ParallelContext, build_mesh, shape_context
from mlm.parallel.sharding import parameter_shards
from mlm.runs.config import PretrainConfig
from mlm.training.pipelined import PipelinedModel
from tests.slow import slow_but

META = torch.device("meta")
SC21 = ["model=gpt2_sc21_1t", "parallel=sc21_1t", "sequence_parallel=true"]
"""PTD-P: 1 trillion parameters, 3072 GPUs, tp=8 pp=64 dp=6 (arXiv:2104.04473, table 1)."""


def config_of(overrides: list[str]) -> PretrainConfig:
    config: PretrainConfig = load_config("pretrain", [*overrides, "data=synthetic"])
    return config


@contextmanager
def as_rank(config: PretrainConfig, rank: int) -> Iterator[ParallelContext]:
    """Be one rank of the layout, its groups made and answering at once."""
    p = config.parallel
    dist.init_process_group("fake", rank=rank, world_size=p.tp * p.pp * p.dp, store=FakeStore())
    try:
        yield build_mesh(tp=p.tp, pp=p.pp, dp=p.dp, device=META, timeout_s=60, host_backend="fake")
    finally:
        dist.destroy_process_group()


def built(config: PretrainConfig, ctx: ParallelContext) -> PipelinedModel:
    return PipelinedModel(config.model, config.parallel, config.precision, ctx)


def test_the_ranks_together_hold_each_parameter_once() -> None:
    """Summed over tp and pp ranks of one replica: true vocabulary rows only."""
    config = config_of(SC21)
    p = config.parallel
    held = 0
    for stage in range(p.pp):
        first, last = (whole_sizes(config, stage * p.tp + tensor) for tensor in (0, p.tp - 1))
        assert first == last  # what the tp ranks hold parts of is the same
        held += sum(first)
    assert held == count_parameters(config.model)


def whole_sizes(config: PretrainConfig, rank: int) -> list[int]:
    """Elements of each parameter that a rank of one replica holds a part of, tied copies left out."""
    ctx = replace(shape_context(rank, tp=config.parallel.tp, pp=config.parallel.pp), device=META)
    shards = [s for chunk in built(config, ctx).chunks for s in parameter_shards(chunk, ctx.tp)]
    return [math.prod(s.global_shape) for s in shards if not getattr(s.module, "is_tied_copy", False)]


def test_a_rank_of_the_trillion_layout_holds_two_layers_and_its_share_of_them() -> None:
    """25600 × 160 heads over 8: qkv [9600, 25600], mlp.up [12800, 25600]; about 1/512 of the model."""
    config = config_of(SC21)
    with as_rank(config, 3072 // 2) as ctx:
        (chunk,) = built(config, ctx).chunks
        assert list(chunk.layers) == ["64", "65"]
        layer = chunk.layers["64"]
        assert tuple(layer.attention.qkv.weight.shape) == (9600, 25600)
        assert tuple(layer.mlp.up.weight.shape) == (12800, 25600)
        count = sum(parameter.numel() for parameter in chunk.parameters())
        assert count * 512 == pytest.approx(1008e9, rel=0.01)


@pytest.mark.parametrize("rank", slow_but({1}, [0, 3071]))
def test_any_rank_of_the_trillion_layout_computes_a_step(rank: int) -> None:
    """Forward and backward of eight micro-batches: shapes fit at both ends, each weight gets a gradient."""
    config = config_of(SC21)
    with as_rank(config, rank) as ctx:
        model = built(config, ctx)
        tokens = torch.zeros(1, config.data.seq_length, dtype=torch.int64, device=META)
        scale = torch.ones(1, device=META)
        losses = model.train(
            [Batch(tokens, tokens, i) for i in range(8)],
            NextToken(ctx, model.dtype, None),
            scale,
            lambda batch: None,
        )
        assert len(losses) == (8 if ctx.pp.rank == 63 else 0)
        for parameter in model.chunks[0].parameters():
            assert parameter.grad.shape == parameter.shape
