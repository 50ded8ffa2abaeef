"""ema.decay: an average of the weights, against PyTorch's Adam, at every layout, saved, resumed, written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mlm
from mlm.checkpoint.native.folders import CHECKPOINTS, step_name
from mlm.checkpoint.native.format import read_manifest
from mlm.checkpoint.native.reader import Reader
from mlm.checkpoint.native.slices import Region
from mlm.cli import main
from mlm.data.sampler import SyntheticDataset, eval_batches
from mlm.optim.config import EmaConfig, PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.resume import resume
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.slow import slow_but
from tests.training.records import records
from tests.training.saving import save
from tests.training.test_trainer import SEQ, VOCAB, config, steps_of

DECAY, STEPS = 0.9, 4
TINY = """
    model=gpt2_tiny data=synthetic data.seq_length=32 train.global_batch_size=4 train.micro_batch_size=4
    schedule=constant log.every=1 dist.device=cpu ema.decay=0.5
""".split()  # noqa: SIM905


def averaged(decay: float = DECAY, **changes: Any) -> PretrainConfig:
    return replace(config(dtype=changes.pop("dtype", "fp64")), ema=EmaConfig(decay=decay), **changes)


def averages(trainer: Trainer) -> dict[str, Tensor]:
    return {s.name: trainer.average.values[s.parameter].clone() for s in trainer.shards if s.is_trained}


def test_the_average_is_that_of_adam_over_the_weights() -> None:
    """exp_avg / (1 - beta1^n) of torch.optim.Adam that receives the weights as gradients."""
    trainer = Trainer(averaged(), shape_context())
    moving = [torch.zeros_like(s.parameter, requires_grad=True) for s in trainer.shards]
    adam = torch.optim.Adam(moving, lr=0.0, betas=(DECAY, 0.999))
    for n in range(1, STEPS + 1):
        steps_of(trainer, 1)
        for x, shard in zip(moving, trainer.shards, strict=True):
            x.grad = shard.parameter.detach().clone()
        adam.step()
        for x, shard in zip(moving, trainer.shards, strict=True):
            want = adam.state[x]["exp_avg"] / (1 - DECAY**n)
            torch.testing.assert_close(trainer.average.values[shard.parameter], want, rtol=0, atol=1e-12)


def test_a_step_that_overflows_is_not_averaged() -> None:
    base = averaged(dtype="fp16")
    spec = replace(base, precision=PrecisionConfig(dtype="fp16", initial_loss_scale=2.0**60))
    trainer = Trainer(spec, shape_context())
    steps_of(trainer, 2)
    assert trainer.average.count.item() == 0
    assert not any(x.any() for x in averages(trainer).values())
    weights = [shard.parameter.detach().clone() for shard in trainer.shards]
    trainer.swap_average()  # of no update it is the weights, not zeros
    assert all(torch.equal(s.parameter, x) for s, x in zip(trainer.shards, weights, strict=True))
    assert not any(x.any() for x in averages(trainer).values())


def stored(path: Path, prefix: str) -> dict[str, Tensor]:
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        return {
            name: reader.read(name, Region.full(entry.shape))
            for name, entry in manifest.tensors.items()
            if name.startswith(prefix)
        }


LAYOUTS = {
    "dp2-zero3": ParallelConfig(dp=2, zero=3),
    "tp2-pp2-sp": ParallelConfig(tp=2, pp=2, sequence_parallel=True),
}


def validated(ctx: ParallelContext, spec: PretrainConfig) -> list[float]:
    """Validation losses of the weights, of their average, and of the weights again."""
    trainer, losses = Trainer(spec, ctx), list[float]()
    steps_of(trainer, STEPS)
    for _ in range(3):
        windows = SyntheticDataset(VOCAB, SEQ, 8, 0)
        losses += trainer.validate(
            eval_batches(windows, micro_batch_size=2, rank=ctx.dp.rank, size=ctx.dp.size)
        )
        trainer.swap_average()
    return losses


@pytest.mark.parametrize("name", slow_but({0}, LAYOUTS))
def test_every_layout_validates_the_average_of_one_process(name: str) -> None:
    """Weights that a pass has gathered from shards are not taken for the average, nor the other way round."""
    layout = LAYOUTS[name]
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp or 1}
    (one,) = run_on_ranks(validated, averaged())
    for many in run_on_ranks(validated, replace(averaged(), parallel=layout), **sizes):
        assert many == pytest.approx(one, abs=1e-9)
    assert one[0] == one[2]
    assert abs(one[0] - one[1]) > 1e-6


def test_a_resumed_average_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    straight = Trainer(averaged(), shape_context())
    steps_of(straight, STEPS)
    first = Trainer(averaged(out=str(tmp_path)), shape_context())
    steps_of(first, 2)
    save(first, tmp_path)
    second = Trainer(averaged(out=str(tmp_path)), shape_context())
    assert resume(second) is not None
    steps_of(second, STEPS - 2)
    for name, x in averages(straight).items():
        assert torch.equal(averages(second)[name], x), name


@pytest.mark.parametrize(("before", "after"), [(0.0, DECAY), (DECAY, 0.5)])
def test_an_average_may_begin_end_and_change_on_resume(tmp_path: Path, before: float, after: float) -> None:
    """One that begins is, after a step, that step's weights."""
    first = Trainer(averaged(before, out=str(tmp_path)), shape_context())
    steps_of(first, 2)
    save(first, tmp_path)
    second = Trainer(averaged(after, out=str(tmp_path)), shape_context())
    assert resume(second) is not None
    steps_of(second, 1)
    assert [change["key"] for change in second.ancestry.changes] == ["ema.decay"]
    if not before:
        for shard in second.shards:
            assert torch.equal(averages(second)[shard.name], shard.parameter)


def test_reshard_writes_the_average_as_weights_of_their_own(tmp_path: Path) -> None:
    """To load, score and export like any other checkpoint."""
    run = tmp_path / "run"
    assert main(["pretrain", *TINY, "train.steps=3", "train.validate_every=0", f"out={run}"]) == 0
    assert main(["reshard", str(run), "tp=2", "ema=true", f"out={tmp_path / 'mean'}"]) == 0
    want = stored(run / CHECKPOINTS / step_name(3), "optimizer.ema.")
    path = tmp_path / "mean" / CHECKPOINTS / step_name(3)
    for name, x in stored(path, "").items():
        assert torch.equal(x, want.pop(name.replace("model.", "optimizer.ema.")))
    assert not want
    assert read_manifest(path).state["weights_only"] is True
    ids = torch.arange(8)[None]
    mean, last = (mlm.load(str(tmp_path / name)).logits(ids) for name in ("mean", "run"))
    assert not torch.equal(mean, last)


@pytest.mark.slow
def test_what_holds_no_average_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "ema.decay=0", "train.steps=1", "train.validate_every=0", f"out={tmp_path / 'run'}"]
    assert main(["pretrain", *words]) == 0
    assert main(["reshard", str(tmp_path / "run"), "ema=true", f"out={tmp_path / 'mean'}"]) == 2
    assert "holds no average of its weights; train with ema.decay" in capsys.readouterr().err


def test_the_average_is_validated_and_kept_on_request(tmp_path: Path) -> None:
    """The loss reported is that of the weights that `mlm reshard ema=true` writes; training is as without."""
    usual = [*TINY, "train.validate_batches=1"]
    words = [*usual, "train.steps=3", "train.validate_every=3", "optimizer.lr=1e-2"]
    asked = ["ema.validate=true", "train.keep_best=true"]
    assert main(["pretrain", *words, *asked, f"out={tmp_path / 'asked'}"]) == 0
    assert main(["pretrain", *words, f"out={tmp_path / 'plain'}"]) == 0
    last = [run / CHECKPOINTS / step_name(3) for run in (tmp_path / "asked", tmp_path / "plain")]
    assert all(torch.equal(x, stored(last[1], "")[name]) for name, x in stored(last[0], "").items())
    best = stored(tmp_path / "asked/best" / CHECKPOINTS / step_name(3), "model.")
    for name, x in stored(last[0], "optimizer.ema.").items():
        assert torch.equal(best[name.replace("optimizer.ema.", "model.")], x)
    (record,) = records(tmp_path / "asked", "validation")
    again = [*usual, "train.steps=1", "train.validate_every=1", "optimizer.lr=1e-30"]
    assert main(["pretrain", *again, f"ckpt={tmp_path / 'asked'}", f"out={tmp_path / 'again'}"]) == 0
    (scored,) = records(tmp_path / "again", "validation")
    assert record["validation/ema_loss"] == pytest.approx(scored["loss"], abs=1e-6)
    assert record["loss"] != record["validation/ema_loss"]
