"""Bit flips in what must be equal on several ranks, and the line that names them."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm.checkpoint.native.run_state import DOUBTFUL_SINCE, INCIDENTS
from mlm.optim.adamw import moment
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import IncidentConfig
from mlm.training.incidents.comparisons import digest, minority_ranks, replica_differences
from mlm.training.incidents.watcher import Incidents
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.incidents.runs import watcher
from tests.training.incidents.test_places import batches_of
from tests.training.incidents.test_transient import usual
from tests.training.test_trainer import config


def flip(x: torch.Tensor, bit: int = 3) -> None:
    """Flip one low bit of the first element of a float64 tensor."""
    x.data.view(torch.int64).flatten()[0] ^= 1 << bit


def shard(trainer: Trainer, name: str) -> Any:
    return next(each for each in trainer.shards if each.name == name)


PLANTS: dict[str, Callable[[Trainer], None]] = {
    "layers.0.mlp.up.weight": lambda t: flip(shard(t, "layers.0.mlp.up.weight").parameter),
    "exp_avg_sq of layers.1.mlp.down.bias": lambda t: flip(
        moment(t.optimizer, shard(t, "layers.1.mlp.down.bias"), "exp_avg_sq")
    ),
    "learning rate": lambda t: t.optimizer.param_groups[0].__setitem__("lr", 0.5),
    "data position": lambda t: setattr(t, "consumed_samples", 4),
    "loss scale": lambda t: t.scaler.scale.fill_(2.0),
}


def found(ctx: ParallelContext, names: list[str], rank: int) -> list[list[str]]:
    """The lines of each plant on one rank, after none without."""
    lines = [replica_differences(Trainer(config(), ctx))]
    for name in names:
        trainer: Trainer = Trainer(config(), ctx)
        if ctx.rank == rank:
            PLANTS[name](trainer)
        lines.append(replica_differences(trainer))
    return lines


def test_a_flipped_bit_of_one_replica_names_tensor_rank_and_host() -> None:
    names = list(PLANTS)
    for clean, *lines in run_on_ranks(found, names, 2, dp=3):
        assert clean == []
        for name, line in zip(names, lines, strict=True):
            axis = "dp" if "layers" in name else "world"
            assert line[0].startswith(f"{name} differs over {axis} on rank 2 (host ")


def test_replicated_tensors_are_compared_over_tp_and_split_ones_are_not() -> None:
    names = ["exp_avg_sq of layers.1.mlp.down.bias", "layers.0.mlp.up.weight"]
    clean, bias, split = run_on_ranks(found, names, 1, tp=2)[0]
    assert (clean, split) == ([], [])
    assert bias[0].startswith(f"{names[0]} differs over tp on ranks 0, 1 (host ")


def test_tied_tables_are_compared_over_their_stages() -> None:
    clean, torn = run_on_ranks(tied, pp=2)[0]
    assert clean == []
    assert torn[0].startswith("token.weight differs over tied on ranks 0, 1")


def tied(ctx: ParallelContext) -> list[list[str]]:
    trainer: Trainer = Trainer(config(), ctx)
    lines = [replica_differences(trainer)]
    if ctx.rank == 1:
        flip(shard(trainer, "token.weight").parameter)
    return [*lines, replica_differences(trainer)]


@pytest.mark.parametrize("values, odd", [([1, 1, 2], [7]), ([1, 2], [5, 6]), ([2, 1, 1, 1], [5])])
def test_the_rank_without_a_majority_is_named(values: list[int], odd: list[int]) -> None:
    assert minority_ranks(values, [5, 6, 7, 8][: len(values)]) == odd


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    x, choose = torch.randn(33).to(dtype), random.Random(0)
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    before = digest(x)
    for bit in range(8 * x.element_size() - 1):
        y = x.clone()
        y.view(width)[choose.randrange(33)] ^= 1 << bit
        assert digest(y) != before


def faulty_replica(ctx: ParallelContext, out: Path, action: Any) -> tuple[list[str], int, bool]:
    """What a step says of a weight that is wrong on rank 1, since when the run is in doubt, if it ended."""
    trainer = Trainer[Any](replace(config(), incident=IncidentConfig(action=action)), ctx)
    incidents: Incidents = watcher(trainer, out)
    incidents.state.recent = usual()
    if ctx.rank == 1:
        next(s for s in trainer.shards if s.name == "token.weight").parameter.data.mul_(1e4)
    ended = False
    try:
        trainer.train_step((incidents.on_step_start(batches := batches_of(trainer)), batches)[1])
    except Exception as error:  # of all ranks
        ended = "resume from a checkpoint before it" in str(error)
    return incidents.said, incidents.state.doubt, ended  # type: ignore[attr-defined]


@pytest.mark.parametrize(("action", "ends"), [("log", False), ("rewind", True)])
def test_an_incident_of_one_replica_blames_no_sample(action: str, ends: bool, tmp_path: Path) -> None:
    for (said,), doubt, ended in run_on_ranks(faulty_replica, tmp_path, action, dp=2):
        assert "silent corruption: token.weight differs over dp on ranks 0, 1" in said
        assert "sample" not in said
        assert (doubt, ended) == (1, ends)


def save_with_a_flip(ctx: ParallelContext, out: Path) -> tuple[int | None, int, str]:
    """Since when a save says that replicas differ and its checkpoint is in doubt, what the run hears."""
    trainer = Trainer[Any](config(), ctx)
    incidents = watcher(trainer, out)
    if ctx.rank == 1:
        trainer.shards[0].parameter.data.view(-1)[0] += 1e-9
    incidents.before_save()
    incidents.before_save()  # said once
    return trainer.wrong_since, trainer.extra_state[INCIDENTS][DOUBTFUL_SINCE], " ".join(incidents.said)  # type: ignore[attr-defined]


def test_replicas_are_compared_before_a_save(tmp_path: Path) -> None:
    """The weights after step 0 are what the first step begins with."""
    for wrong_since, since, said in run_on_ranks(save_with_a_flip, tmp_path, dp=2):
        assert (wrong_since, since) == (1, 1)
        assert said.count("silent corruption: ") == 1
