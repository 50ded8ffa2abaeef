"""Any layout of a Llama loads what any other saved, copies of key-value heads included."""

from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from mlm.cli.convert import reshard
from mlm.cli.convert.settings import ReshardConfig
from mlm.optim.adamw import MOMENTS, ensure_state, moment
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.random import derive_seed
from mlm.parallel.sharding import ParameterShard
from mlm.runs.config import PretrainConfig
from mlm.training.state import load
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.saving import save
from tests.verify.parity_layouts import Layout

SHARED = Layout(tp=4, sequence_parallel=True, dp=2, zero=2, llama="llama")
STAGES = Layout(tp=2, pp=2, llama="llama")


def trainer_of(ctx: ParallelContext, layout: Layout) -> Trainer:
    config = layout.config()
    return Trainer(PretrainConfig(**{f.name: getattr(config, f.name) for f in fields(PretrainConfig)}), ctx)


def tensors(trainer: Trainer) -> list[tuple[str, ParameterShard, Tensor]]:
    ensure_state(trainer.optimizer)
    moments = [(m, s, moment(trainer.optimizer, s, m)) for s in trainer.shards for m in MOMENTS]
    return [("weight", s, s.parameter.detach()) for s in trainer.shards] + moments


def known(kind: str, shard: ParameterShard, size: torch.Size) -> Tensor:
    """This rank's region of a tensor whose elements all differ; copies are of one region."""
    shape = shard.global_shape
    whole = torch.arange(torch.Size(shape).numel()).view(shape) + derive_seed(kind, shard.name) % 1000
    return whole[tuple(slice(o, o + n) for o, n in zip(shard.offset, size, strict=True))].double()


def save_known(ctx: ParallelContext, layout: Layout, out: Path) -> Path:
    trainer = trainer_of(ctx, layout)
    for kind, shard, tensor in tensors(trainer):
        part = shard.without_padding(tensor)
        part.copy_(known(kind, shard, part.shape))
    trainer.step = 1
    return save(trainer, out)


def check_loaded(ctx: ParallelContext, layout: Layout, path: Path) -> None:
    trainer = trainer_of(ctx, layout)
    load(trainer, path)
    for kind, shard, tensor in tensors(trainer):
        part = shard.without_padding(tensor)
        assert torch.equal(part, known(kind, shard, part.shape)), f"{kind} of {shard.name}"


def test_layouts_with_and_without_copies_load_each_others_checkpoints(tmp_path: Path) -> None:
    """Directly, and by way of a reshard to four tp ranks, where two have no rows of keys."""
    path = run_on_ranks(save_known, SHARED, tmp_path / "run", **SHARED.sizes)[0]
    run_on_ranks(check_loaded, STAGES, path, **STAGES.sizes)
    config = ReshardConfig(ckpt=str(tmp_path / "run"), out=str(tmp_path / "four"), tp=4)
    assert reshard.preflight(config) == []
    reshard.run(config)
    run_on_ranks(check_loaded, SHARED, tmp_path / "four/checkpoints" / path.name, **SHARED.sizes)
