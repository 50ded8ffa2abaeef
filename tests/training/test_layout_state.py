"""Checkpoints, evaluation and sampling at layouts with pipelines and sharded replicas."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native.save_load import latest_checkpoint, read_manifest
from mlm.data.sampler import Loader, SyntheticDataset, eval_batches
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.state import load
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError
from tests.ranks import run_on_ranks
from tests.slow import slow_but
from tests.training.saving import save
from tests.training.test_trainer import SEQ, VOCAB, config, steps_of
from tests.verify.parity_layouts import Layout, parse_layouts

LAYOUTS = [
    ParallelConfig(pp=2, vp=2, dp=2),
    ParallelConfig(dp=2, zero=3),
    ParallelConfig(cp=2, tp=2, sequence_parallel=True, zero=2),
]


def spec_of(parallel: ParallelConfig, *, dropout: float = 0.0, dtype: str = "fp64") -> PretrainConfig:
    spec = config(dropout=dropout, dtype=dtype)
    return replace(spec, model=replace(spec.model, num_layers=4), parallel=parallel)


def sizes(parallel: ParallelConfig) -> dict[str, Any]:
    whole = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "dp": parallel.dp or 1}
    return whole | {"ep": parallel.ep, "expert_tp": parallel.expert_tp}


@pytest.mark.parametrize("parallel", slow_but({0, 1}, [ParallelConfig(), *LAYOUTS]), ids=str)
def test_resumed_losses_are_bit_equal(tmp_path: Path, parallel: ParallelConfig) -> None:
    """Four steps straight against two, save, a fresh trainer, load, two more; with dropout."""
    for straight, resumed in run_on_ranks(
        resume, tmp_path, spec_of(parallel, dropout=0.1, dtype="fp32"), **sizes(parallel)
    ):
        assert resumed == straight


def resume(ctx: ParallelContext, out: Path, spec: PretrainConfig) -> tuple[list[float], list[float]]:
    straight = steps_of(Trainer(spec, ctx), 4)
    first = Trainer(spec, ctx)
    losses = steps_of(first, 2)
    path = save(first, out)
    second = Trainer(spec, ctx)
    for shard in second.shards:
        shard.parameter.data.fill_(7.0)  # nothing of the initial weights may survive
    load(second, path)
    return straight, losses + steps_of(second, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    slow_but(
        {0},
        [
            ("pp=2 dp=2 ep=2", "tp=2 dp=2 ep=2"),
            ("dp=4 ep=2 zero=3 micro_batches=1", "tp=2 sequence_parallel expert_tp=1 ep=2 micro_batches=4"),
        ],
    ),
    ids=str,
)
def test_a_run_of_experts_moves_through_layouts(tmp_path: Path, first: str, second: str) -> None:
    """ep, expert_tp, tp, pp and zero may change at a checkpoint; biases of routers included."""
    losses = []
    for layout in parse_layouts(f"{first} moe=sigmoid", f"{second} moe=sigmoid"):
        losses += run_on_ranks(two_steps_more, tmp_path, layout.config(), **layout.sizes)[0]
    alone = steps_of(Trainer(Layout(moe="sigmoid", micro_batches=4).config(), shape_context()), 4)
    assert losses == pytest.approx(alone, abs=1e-10)


def two_steps_more(ctx: ParallelContext, out: Path, spec: PretrainConfig) -> list[float]:
    trainer = Trainer(spec, ctx)
    start = latest_checkpoint(out / "checkpoints")
    if start is not None:
        load(trainer, start)
    losses = steps_of(trainer, 2)
    save(trainer, out)
    return losses


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_validation_does_not_depend_on_the_layout(parallel: ParallelConfig) -> None:
    """Thirteen windows in micro-batches of two, before a step and after it."""
    alone = validate(shape_context(), spec_of(ParallelConfig()))
    for scores in run_on_ranks(validate, spec_of(parallel), **sizes(parallel)):
        assert scores == pytest.approx(alone, abs=1e-12)


def validate(ctx: ParallelContext, spec: PretrainConfig) -> list[float]:
    trainer = Trainer(spec, ctx)
    windows = SyntheticDataset(VOCAB, SEQ, 13, 0)
    scores = []
    for _ in range(2):
        batches = eval_batches(windows, micro_batch_size=2, rank=ctx.dp.rank, size=ctx.dp.size)
        scores += trainer.validate(batches)
        steps_of(trainer, 1)
    return scores


@pytest.mark.parametrize("broken", [{}, {"scaler": None}], ids=str)
def test_a_checkpoint_without_a_run_s_counters_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any]
) -> None:
    """A manifest that another program wrote: one line that names the checkpoint, no traceback."""
    trainer = Trainer(spec_of(ParallelConfig()), shape_context())
    path = save(trainer, tmp_path)
    whole = read_manifest(path)
    state = {**whole.state, **broken} if "scaler" in broken else {"config": whole.state["config"], **broken}
    monkeypatch.setattr("mlm.training.state.load_checkpoint", lambda *a, **k: replace(whole, state=state))
    with pytest.raises(CorruptFileError, match=r"step-0+: its \w+"):
        load(trainer, path)


def test_a_ramp_of_the_batch_goes_on_at_another_dp(tmp_path: Path) -> None:
    """Steps of 4, 8 and 12 samples: the losses of one process, two ranks and a restart in between."""
    spec = config(global_batch_size=12, micro_batch_size=2)
    spec = replace(spec, train=replace(spec.train, ramp_batch=(4, 4, 24)))
    alone = run_on_ranks(ramped, tmp_path / "alone", spec, 6)[0]
    first = run_on_ranks(ramped, tmp_path / "moved", spec, 3, dp=2)[0]
    then = run_on_ranks(ramped, tmp_path / "moved", spec, 3)[0]
    assert [*first, *then] == pytest.approx(alone, abs=1e-10)
    assert alone[1::2] == [4, 4, 4, 8, 8, 12]


def ramped(ctx: ParallelContext, out: Path, spec: PretrainConfig, steps: int) -> list[float]:
    """Losses and sizes of some steps more, and a checkpoint."""
    trainer = Trainer(spec, ctx)
    start = latest_checkpoint(out / "checkpoints")
    if start is not None:
        load(trainer, start)
    samples, train, found = SyntheticDataset(VOCAB, SEQ, 300, spec.seed), spec.train, []
    place = {"rank": ctx.dp.rank, "size": ctx.dp.size, "ramp": train.ramp_batch}
    with Loader(
        samples, consumed_samples=trainer.consumed_samples, global_batch_size=12, micro_batch_size=2, **place
    ) as loader:
        for _ in range(steps):
            found.append(trainer.mean_loss(trainer.train_step(next(loader))))
            found.append(float(len(trainer.newest_samples)))
    save(trainer, out)
    return found
