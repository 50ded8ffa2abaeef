"""Saving in the background: what is written, what training waits for, and what becomes of failures."""

import errno
import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mlm.checkpoint.native.save_load import CheckpointError
from mlm.checkpoint.native.staging import StagedFile
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.parallel.watch import LostPeer
from mlm.runs.config import CheckpointConfig, PretrainConfig
from mlm.training.observer import Observers
from mlm.training.saver import Saver
from mlm.training.state import load
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.test_trainer import config, steps_of

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank-00001.safetensors")


class Told:
    def __init__(self) -> None:
        self.saved_steps: list[int] = []
        self.failures: list[tuple[int, str]] = []

    def saved(self, step: int, path: Path, seconds: float, waited: float, digest: str | None) -> None:
        assert path.is_dir()
        assert 0 <= waited <= seconds
        self.saved_steps.append(step)

    def save_failed(self, step: int, error: str) -> None:
        self.failures.append((step, error))


def spec(**checkpoint: Any) -> PretrainConfig:
    return replace(config(dtype="fp32", dropout=0.1), checkpoint=CheckpointConfig(**checkpoint))


def saver_of(trainer: Trainer, out: Path, *, aside: bool = True) -> tuple[Saver, Told]:
    """A saver; `aside`: that copies in its thread, as it does on a GPU."""
    told = Told()
    saver = Saver(trainer, out, told)  # type: ignore[arg-type]
    saver._copies_aside = aside
    trainer.observers = Observers([saver])
    return saver, told


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [s.parameter.detach().clone() for s in trainer.shards]


def slowed(file: StagedFile) -> Any:
    """Hold back the copy for a while: weights that do not wait for it change under its hands."""
    allocate = file._allocate

    def late(*args: Any, **settings: Any) -> Any:
        threading.Event().wait(0.3)
        return allocate(*args, **settings)

    return mock.patch.object(file, "_allocate", late)


@pytest.mark.parametrize(("asynchronous", "aside"), [(True, True), (False, False)])
def test_a_checkpoint_holds_its_step_whatever_training_does_meanwhile(
    tmp_path: Path, asynchronous: bool, aside: bool
) -> None:
    trainer = Trainer(spec(asynchronous=asynchronous), shape_context())
    saver, told = saver_of(trainer, tmp_path, aside=aside)
    steps_of(trainer, 2)
    before = weights(trainer)
    with slowed(saver._file) if asynchronous else nullcontext(), saver:
        saver.begin()
        straight = steps_of(trainer, 2)
        saver.finish()
    assert told.saved_steps == [2]
    other = Trainer(trainer.config, shape_context())
    manifest = load(other, tmp_path / "checkpoints" / "step-00000002")
    assert all(map(torch.equal, weights(other), before))
    assert (manifest.state["step"], other.consumed_samples) == (2, 16)
    assert steps_of(other, 2) == straight


def test_a_checkpoint_of_sharded_replicas_holds_its_step(tmp_path: Path) -> None:
    for straight, resumed in run_on_ranks(save_and_resume, tmp_path, dp=2):
        assert resumed == straight


def save_and_resume(ctx: ParallelContext, out: Path) -> tuple[list[float], list[float]]:
    trainer = Trainer(replace(spec(), parallel=ParallelConfig(dp=2, zero=3)), ctx)
    saver, _ = saver_of(trainer, out)
    steps_of(trainer, 1)
    with slowed(saver._file), saver:
        saver.begin()
        straight = steps_of(trainer, 2)
        saver.finish()
    other = Trainer(trainer.config, ctx)
    for shard in other.shards:
        shard.parameter.data.fill_(7.0)  # nothing of the initial weights may survive
    load(other, out / "checkpoints" / "step-00000001")
    return straight, steps_of(other, 2)


def test_forward_and_backward_do_not_wait_for_the_copy(tmp_path: Path) -> None:
    trainer = Trainer(spec(), shape_context())
    saver, _ = saver_of(trainer, tmp_path)
    go, order = threading.Event(), []
    allocate, update = saver._file._allocate, trainer.clip_and_update

    def held(*args: Any, **settings: Any) -> Any:
        assert go.wait(30)
        order.append("copy")
        return allocate(*args, **settings)

    def noted(loss: torch.Tensor) -> Any:
        order.append("gradients")
        go.set()  # the copy begins after the backward pass has ended, and the update waits for it
        return update(loss)

    with (
        mock.patch.object(saver._file, "_allocate", held),
        mock.patch.object(trainer, "clip_and_update", noted),
        saver,
    ):
        saver.begin()
        steps_of(trainer, 1)
    assert order == ["gradients", "copy"]


def test_one_save_is_in_flight_at_a_time(tmp_path: Path) -> None:
    trainer = Trainer(spec(keep_last=5), shape_context())
    saver, told = saver_of(trainer, tmp_path)
    with slowed(saver._file), saver:
        for _ in range(3):
            steps_of(trainer, 1)
            saver.begin()
            assert told.saved_steps == list(range(1, trainer.step))
    assert told.saved_steps == [1, 2, 3]  # leaving waits for the last


@pytest.mark.parametrize(
    ("sound", "kept"), [(True, ["step-00000001"]), (False, ["step-00000000", "step-00000001"])]
)
def test_a_save_deletes_older_ones_only_if_the_next_step_is_finite(
    tmp_path: Path, sound: bool, kept: list[str]
) -> None:
    """Its own weights may be what ruins that step."""
    trainer = Trainer(spec(keep_last=1), shape_context())
    saver, _ = saver_of(trainer, tmp_path)
    with saver:
        saver.begin()
        steps_of(trainer, 1)
        saver.after_step(None)
        saver.begin()
        steps_of(trainer, 1)
        trainer.wrong_since = None if sound else trainer.step
        saver.after_step(None)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == kept


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_last_save_s_failure_is_raised(tmp_path: Path, asynchronous: bool) -> None:
    trainer = Trainer(spec(asynchronous=asynchronous), shape_context())
    (tmp_path / "checkpoints").write_text("a file in its place")
    saver, told = saver_of(trainer, tmp_path)
    with saver:
        saver.begin()
        with pytest.raises(CheckpointError, match=r"checkpoints: could not be saved \(rank 0\)") as caught:
            saver.finish()
    assert caught.value.exit_code == 1
    assert [step for step, _ in told.failures] == [0]


def test_a_lost_rank_is_raised_not_reported_as_a_failed_save(tmp_path: Path) -> None:
    trainer = Trainer(spec(), shape_context())
    saver, told = saver_of(trainer, tmp_path)
    with mock.patch("mlm.training.saver.save_checkpoint", side_effect=LostPeer("rank 1 is gone")), saver:
        saver.begin()
        with pytest.raises(LostPeer, match="rank 1 is gone"):
            saver.finish()
    assert not told.failures


def one_rank_cannot_write(ctx: ParallelContext, out: Path) -> Any:
    """Three saves, the second with a full disk on rank 1; training between and after."""
    trainer = Trainer(spec(), ctx)
    saver, told = saver_of(trainer, out)
    losses = []
    with saver:
        for number in range(3):
            losses += steps_of(trainer, 1)
            saver._collect()
            broken = number == 1 and ctx.rank == 1
            with mock.patch.object(StagedFile, "write", side_effect=FULL) if broken else nullcontext():
                saver.begin()
                losses += steps_of(trainer, 1)
                saver._collect()
    return told.saved_steps, told.failures, losses


def test_a_rank_that_cannot_write_fails_the_save_everywhere_and_training_continues(tmp_path: Path) -> None:
    first, second = run_on_ranks(one_rank_cannot_write, tmp_path, pp=2)
    assert first == second
    saved, failures, losses = first
    assert saved == [1, 5]
    ((step, message),) = failures
    assert step == 3
    assert "(rank 1): No space left on device" in message
    assert message.endswith("the previous checkpoint step-00000001 is intact")
    assert losses == run_on_ranks(undisturbed, pp=2)[0]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000001", "step-00000005"]


def undisturbed(ctx: ParallelContext) -> list[float]:
    return steps_of(Trainer(spec(), ctx), 6)
