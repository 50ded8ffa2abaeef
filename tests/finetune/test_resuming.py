"""A run that was killed or stopped resumes with the same numbers; a finished one is left alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm.checkpoint.native.folders import checkpoints
from mlm.checkpoint.native.format import CheckpointError
from mlm.checkpoint.native.run_state import FINETUNING
from mlm.finetune import training
from mlm.finetune.config import FinetuneCheckpointConfig, FinetuneConfig
from mlm.finetune.scoring import Scorer
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import IncidentConfig
from mlm.training import loop
from mlm.training.saver import SaveFailedError
from mlm.training.state import save_best
from mlm.training.trainer import Trainer
from tests.finetune.runs import check_same_run, finetune, finetuning, losses, weights
from tests.slow import slow

STEPS = 6  # 11 rows in batches of 4, 2 epochs


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    finetune(config_of(folder))
    return folder


def config_of(folder: Path, **changes: Any) -> FinetuneConfig:
    train = {"validate_every": 1} | changes.pop("train", {})
    return finetuning(folder, train=train, **changes)


def dies(config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """Run it and die behind the call of a function that is the `at`-th."""
    calls, whole = [], getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        result = whole(*args, **kwargs)
        calls.append(1)
        if len(calls) == at:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, called)
        with pytest.raises(Killed):
            training.run(config, ParallelContext())


def check_same(folder: Path, out: Path) -> None:
    """A run like the undisturbed one, bit for bit, and its best checkpoint alone."""
    check_same_run(out, folder / "out")
    for place in ("checkpoints", "best/checkpoints"):
        (one,), (other,) = (checkpoints(run / place) for run in (out, folder / "out"))
        assert one == other
    best, wanted = (weights(run / "best/checkpoints") for run in (out, folder / "out"))
    assert all(torch.equal(best[name], wanted[name]) for name in wanted)


def test_a_changed_setting_that_numbers_depend_on_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(folder, out=str(tmp_path / "out"))
    dies(config, monkeypatch, *STEP, 3)
    capsys.readouterr()
    finetune(replace(config, incident=IncidentConfig(action="skip")))
    assert "changed at step 2: incident.action log → skip" in capsys.readouterr().out


STEP, BEST = (Trainer, "clip_and_update"), (loop, "save_best")
KILLS = [(STEP, 3, 2), (BEST, 2, 4), slow((BEST, 2, 100))]
"""Killed after the call of a function: between saves, or after a best checkpoint that no other knows of."""


@pytest.mark.parametrize(("call", "at", "save_every"), KILLS)
def test_a_killed_run_continues_bit_for_bit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, at: int, save_every: int
) -> None:
    keep = FinetuneCheckpointConfig(save_every=save_every)
    config = config_of(folder, out=str(tmp_path / "out"), checkpoint=keep)
    dies(config, monkeypatch, *call, at)
    finetune(config)
    check_same(folder, tmp_path / "out")


@pytest.mark.slow
def test_dropout_continues_too(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks are functions of the seed and of numbers that no two micro-batches of a run share.

    The judgement of the run's end reads the two of the last step once more.
    """
    numbers, whole = [], Trainer.dropout

    def dropout(self: Trainer, batch: Any) -> Any:
        numbers.append(batch.first_sample)
        return whole(self, batch)

    small: dict[str, Any] = {"dropout": 0.2, "train": {"micro_batch_size": 1}}
    finetune(config_of(folder, out=str(tmp_path / "whole"), **small))
    assert losses(tmp_path / "whole") != losses(folder / "out")
    config = config_of(folder, out=str(tmp_path / "out"), **small)
    dies(config, monkeypatch, Trainer, "clip_and_update", 3)
    monkeypatch.setattr(Trainer, "dropout", dropout)
    finetune(config)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert numbers[-2:] == numbers[-4:-2]
    assert len(set(numbers)) == len(numbers[:-2]) > 4


def test_repeated_steps_that_score_less_keep_the_best_checkpoint_and_its_scores(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, scores = tmp_path / "out", iter([1.0, 2.0, 9.0, 1.5, 1.5, 1.5, 1.5])
    monkeypatch.setattr(Scorer, "score", lambda *args, **kwargs: ({"accuracy": next(scores)}, []))
    config = config_of(folder, out=str(out), checkpoint=FinetuneCheckpointConfig(save_every=2))
    dies(config, monkeypatch, loop, "save_best", 3)
    result = finetune(config)
    assert (result["best_step"], result["scores"]) == (3, {"validation": {"accuracy": 9.0}})
    assert set(checkpoints(out / "best/checkpoints")) == {3}


@pytest.mark.parametrize("full_until", [2, slow(STEPS)])
def test_a_run_continues_where_its_best_weights_cannot_be_saved_unless_it_has_none_at_its_end(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    full_until: int,
) -> None:
    """They are tried again at the next better score, and by the same command."""

    def full(trainer: Trainer, out: Path) -> None:
        if trainer.step <= full_until:
            raise CheckpointError("No space left on device")
        save_best(trainer, out)

    scores = [3.0, 4.0, 2.0, 1.0, 1.5, 1.0]
    monkeypatch.setattr(Scorer, "score", lambda *args, **kwargs: ({"accuracy": scores.pop(0)}, []))
    monkeypatch.setattr(loop, "save_best", full)
    config = config_of(folder, out=str(tmp_path / "out"))
    if full_until == STEPS:
        with pytest.raises(SaveFailedError, match="No space left"):
            training.run(config, ParallelContext())
        scores, full_until = [9.0], 0
    result = finetune(config)
    assert "SAVING FAILED at step 1: No space left on device" in capsys.readouterr().err
    assert result["best_step"] == (3 if full_until else STEPS)


def test_a_save_under_way_does_not_see_later_validations(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = type("T", (), {"extra_state": {FINETUNING: {"progress": "old"}}})()
    one = object.__new__(training.FinetuneLoop)
    one.trainer, one.progress = trainer, training.Progress(best_step=3)
    before = trainer.extra_state[FINETUNING]
    one.record_progress()
    assert before == {"progress": "old"}
    assert trainer.extra_state[FINETUNING]["progress"]["best_step"] == 3
