"""Checkpoints between layouts that cut parameters over tp, over dp or over both."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.save_load import load_checkpoint, save_checkpoint
from mlm.parallel.mesh import ParallelContext
from mlm.training.state import training_shards
from tests.parallel.sharded_rank import Rank, samples_of
from tests.ranks import run_on_ranks


def test_a_checkpoint_moves_between_sharded_and_tensor_parallel_layouts(tmp_path: Path) -> None:
    """zero=3 dp=4 -> zero=0 tp=2 dp=2 -> zero=2 tp=2 dp=2 -> one process, moments included, bit for bit."""
    run_on_ranks(train_and_save, tmp_path / "a", dp=4)
    run_on_ranks(load_and_save, tmp_path / "a", tmp_path / "b", 0, tp=2, dp=2)
    run_on_ranks(load_and_save, tmp_path / "b", tmp_path / "c", 2, tp=2, dp=2)
    first, last = (run_on_ranks(load_whole_state, tmp_path / name)[0] for name in ("a", "c"))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert all(x.any() for x in first.values())


def train_and_save(ctx: ParallelContext, path: Path) -> None:
    mine = Rank(ctx, 3, master=torch.float32, dtype=torch.float32)
    for step in range(2):
        mine.accumulate(list(samples_of(step, ctx.dp.rank)))
        mine.optimizer.step()
    save(mine, path)


def save(mine: Rank, path: Path) -> None:
    mine_only = training_shards(state_of(mine), [s for s in mine.shards if s.is_stored(mine.ctx.replicas)])
    save_checkpoint(path, 1, mine_only, state={}, keep_last=1, keep_every=0, ranks=Ranks.of(mine.ctx))


def state_of(mine: Rank) -> Any:
    config = SimpleNamespace(model=SimpleNamespace(vocab_multiple=1))
    return SimpleNamespace(shards=mine.shards, optimizer=mine.optimizer, average=None, config=config)


def load_and_save(ctx: ParallelContext, old: Path, new: Path, zero: int) -> None:
    mine = Rank(ctx, zero, master=torch.float32, dtype=torch.float32)
    load_checkpoint(old / "step-00000001", training_shards(state_of(mine), mine.shards), ranks=Ranks.of(ctx))
    save(mine, new)


def load_whole_state(ctx: ParallelContext, path: Path) -> dict[str, Tensor]:
    one = Rank(ctx, master=torch.float32, dtype=torch.float32)
    shards = training_shards(state_of(one), one.shards)
    load_checkpoint(path / "step-00000001", shards, ranks=Ranks.of(ctx))
    return {name: shard.tensor.clone() for name, shard in shards.items()}
