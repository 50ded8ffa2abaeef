"""The start of a run: its newest whole checkpoint, also after a roll-back; a lock; weights alone."""

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mlm.checkpoint.native.folders import LATEST, latest_checkpoint, step_name
from mlm.checkpoint.native.save_load import CheckpointError, read_manifest, save_checkpoint
from mlm.checkpoint.parameters import model_shards
from mlm.cli.pretrain.run import start_from_source
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import CheckpointConfig, PretrainConfig
from mlm.training.preflight import run_start_problems
from mlm.training.resume import claim, resume, resume_candidates, rewind
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.lock import single_writer
from mlm.util.ownership import claim_folder, owner_of
from tests.checkpoints_on_disk import flip
from tests.ranks import run_on_ranks
from tests.slow import slow_but
from tests.training.saving import save
from tests.training.test_trainer import config, steps_of

STEPS = ["step-00000002", "step-00000004", "step-00000006"]


def spec(out: Path, **changed: Any) -> PretrainConfig:
    base = config(dtype="fp32", dropout=0.1)
    return replace(base, out=str(out), checkpoint=CheckpointConfig(keep_last=3), **changed)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run with three checkpoints, and the losses of its eight steps."""
    out = claim_folder(tmp_path_factory.mktemp("straight"), "run")
    trainer = Trainer(spec(out), shape_context())
    losses = []
    for _ in range(3):
        losses += steps_of(trainer, 2)
        save(trainer, out)
    return out, losses + steps_of(trainer, 2)


@pytest.fixture
def out(straight: tuple[Path, list[float]], tmp_path: Path) -> Path:
    shutil.copytree(straight[0], tmp_path / "run")
    return tmp_path / "run"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped shard": lambda step: flip(step / "rank-00000.safetensors", -9),
    "no shard": lambda step: (step / "rank-00000.safetensors").unlink(),
    "flipped manifest": lambda step: flip(step / "manifest.json", -9),
    "stale shard": lambda step: shutil.copy(step.parent / STEPS[0] / "rank-00000.safetensors", step),
}


@pytest.mark.parametrize("damage", slow_but({0}, DAMAGES))
def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_a_warning_that_names_it(
    out: Path, straight: tuple[Path, list[float]], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    DAMAGES[damage](out / "checkpoints" / STEPS[2])
    trainer = Trainer(spec(out), shape_context())
    assert resume(trainer) == out / "checkpoints" / STEPS[1]
    assert STEPS[2] in caplog.text
    assert f"{STEPS[1]}" in caplog.text.rpartition("continuing from")[2]
    assert (trainer.step, trainer.consumed_samples) == (4, 32)
    assert steps_of(trainer, 4) == straight[1][4:]


def test_a_run_does_not_start_afresh_over_checkpoints_whose_damage_only_reading_shows(out: Path) -> None:
    for step in STEPS:
        flip(out / "checkpoints" / step / "rank-00000.safetensors", -9)
    with pytest.raises(CorruptFileError, match="none of 3 checkpoints is whole"):
        resume(Trainer(spec(out), shape_context()))


def origin(new: Path, name: Path, key: str) -> PretrainConfig:
    """A run in `new` that begins with `name`: its weights, or all its state."""
    base = spec(new, ckpt=str(name) if key == "ckpt" else None)
    return base if key == "ckpt" else replace(base, checkpoint=replace(base.checkpoint, from_run=str(name)))


@pytest.mark.parametrize("key", ["ckpt", "from_run"])
def test_a_run_s_own_checkpoint_comes_before_the_named_one(out: Path, tmp_path: Path, key: str) -> None:
    assert resume_candidates(origin(out, tmp_path / "not there", key)) == [
        out / "checkpoints" / step for step in reversed(STEPS)
    ]


def test_weights_of_a_run_begin_another_at_step_0_with_fresh_moments(out: Path, tmp_path: Path) -> None:
    """Seed and schedule are the new run's own; the model must be the same function."""
    config = replace(origin(tmp_path / "new", out, "ckpt"), seed=5)
    assert run_start_problems(config) == []
    given, trainer = Trainer(spec(out), shape_context()), Trainer(config, shape_context())
    resume(given)
    assert resume(trainer) is None
    assert start_from_source(trainer, str(out)) == out / "checkpoints" / STEPS[2]
    assert (trainer.step, trainer.consumed_samples, trainer.ancestry.changes) == (0, 0, ())
    for a, b in zip(given.shards, trainer.shards, strict=True):
        assert torch.equal(a.parameter, b.parameter)
    assert not any(state["exp_avg"].any() for state in trainer.optimizer.state.values())


def test_weights_alone_are_not_continued_elsewhere(tmp_path: Path) -> None:
    weights_only(tmp_path / "given")
    (error,) = run_start_problems(origin(tmp_path / "new", tmp_path / "given", "from_run"))
    assert error.endswith(f"begin a new run with them: ckpt={tmp_path / 'given'} out=…")


def test_a_checkpoint_of_another_model_is_no_damage(out: Path) -> None:
    """An older one would be of that model too."""
    base = spec(out)
    with pytest.raises(UserError, match=r"model.num_layers=3: the run in .* was trained with 2") as caught:
        resume(Trainer(replace(base, model=replace(base.model, num_layers=3)), shape_context()))
    assert caught.value.exit_code == 2


def resumed_on_ranks(ctx: ParallelContext, out: Path) -> tuple[str, list[str], list[float]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mlm").addHandler(handler)
    trainer = Trainer(spec(out), ctx)
    start = resume(trainer)
    logging.getLogger("mlm").removeHandler(handler)
    return start.name, messages, steps_of(trainer, 2)


def test_all_ranks_pass_over_what_one_finds_damaged(out: Path, straight: tuple[Path, list[float]]) -> None:
    """Any rank may digest the file; one of them warns."""
    flip(out / "checkpoints" / STEPS[2] / "rank-00000.safetensors", -9)
    first, second = run_on_ranks(resumed_on_ranks, out, dp=2)
    assert first[0] == second[0] == STEPS[1]
    assert (len(first[1]), len(second[1])) == (1, 0)
    assert first[2] == pytest.approx(straight[1][4:6], abs=1e-5)


def weights_only(out: Path) -> Trainer:
    """A checkpoint of a model alone, as imports write it."""
    trainer = Trainer(spec(out), shape_context())
    steps_of(trainer, 3)
    state = {"weights_only": True, "config": {}}
    settings: dict[str, Any] = {"keep_last": 1, "keep_every": 0}
    save_checkpoint(out / "checkpoints", 0, model_shards(trainer.shards), state=state, **settings)
    return trainer


def test_weights_alone_begin_a_run_at_step_0_with_fresh_moments(tmp_path: Path) -> None:
    given = weights_only(tmp_path / "given")
    trainer = Trainer(spec(tmp_path / "given"), shape_context())
    for shard in trainer.shards:
        shard.parameter.data.fill_(7.0)
    assert resume(trainer) is not None
    assert (trainer.step, trainer.consumed_samples) == (0, 0)
    for a, b in zip(given.shards, trainer.shards, strict=True):
        assert torch.equal(a.without_padding(a.parameter), b.without_padding(b.parameter))
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    assert not any(moment.any() for moment in moments)


def test_a_training_run_that_lost_its_moments_is_rejected(out: Path, tmp_path: Path) -> None:
    """Only a checkpoint that says so holds weights alone."""
    path = tmp_path / "cut" / "checkpoints"
    given = Trainer(spec(tmp_path / "cut"), shape_context())
    state = dict(read_manifest(out / "checkpoints" / STEPS[0]).state)
    settings: dict[str, Any] = {"keep_last": 1, "keep_every": 0}
    save_checkpoint(path, 2, model_shards(given.shards), state=state, **settings)
    with pytest.raises(UserError, match=r"optimizer.exp_avg.* is not in it"):
        resume(Trainer(spec(tmp_path / "cut"), shape_context()))


def test_the_folder_is_found_taken_before_any_rank_starts(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlm.training.preflight.single_writer", partial(single_writer, wait_s=0.0))
    with single_writer(out / "checkpoints"):
        (problem,) = run_start_problems(spec(out))
    assert "in use by process" in problem
    assert run_start_problems(spec(out)) == []


def test_ranks_of_a_launcher_do_not_meet_themselves(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them looks before it joins, and the first may have the folder by then."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with single_writer(out / "checkpoints"):
        assert run_start_problems(spec(out)) == []


def test_files_of_another_user_are_named_once(
    out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        claim(spec(out), shape_context(), stack)
    assert caplog.text == ""
    owner = owner_of(out)
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    with ExitStack() as stack:
        claim(spec(out), shape_context(), stack)
    (line,) = caplog.messages
    assert f"out={out}: holds files of {owner}, and this process writes as user 4000000000" in line


def claim_on(ctx: ParallelContext, out: Path) -> str:
    with ExitStack() as stack:
        try:
            claim(replace(spec(out), dist=replace(spec(out).dist, timeout_s=0.4)), ctx, stack)
        except UserError as error:
            return str(error)
    return "mine"


def test_all_ranks_hear_that_the_folder_is_taken(out: Path) -> None:
    with single_writer(out / "checkpoints"):
        first, second = run_on_ranks(claim_on, out, dp=2)
    assert first == second
    assert "in use by process" in first
    assert run_on_ranks(claim_on, out, dp=2) == ["mine", "mine"]


def go(out: Path, *ends: int, keep_last: int = 9) -> None:
    """Resume the run, if there is one, and save at these steps."""
    base = replace(config(dtype="fp32"), out=str(out), checkpoint=CheckpointConfig(keep_last=keep_last))
    trainer = Trainer(base, shape_context())
    resume(trainer)
    for end in ends:
        steps_of(trainer, end - trainer.step)
        save(trainer, out)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1, 2, 4 and 6; then a roll-back to 2, and steps 3 and 5: 4 and 6 are set aside."""
    out = tmp_path_factory.mktemp("run")
    go(out, 1, 2, 4, 6)
    (out / "checkpoints" / LATEST).write_text(f"{step_name(2)}\n")
    go(out, 3, 5)
    return out


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run/checkpoints"


def damage(root: Path, step: int) -> None:
    (root / step_name(step) / "rank-00000.safetensors").write_bytes(b"short")


def test_a_checkpoint_names_the_saves_it_descends_from(root: Path) -> None:
    past = read_manifest(root / step_name(5)).state["lineage"]["ancestors"]
    assert [step for step, _ in past] == [1, 2, 3]
    assert past[-1][1] == read_manifest(root / step_name(3)).save_id


@pytest.mark.parametrize("loss", [shutil.rmtree, lambda path: (path / "manifest.json").unlink()])
def test_a_lost_checkpoint_gives_way_to_its_parent_not_to_an_abandoned_one(root: Path, loss: object) -> None:
    loss(root / step_name(5))  # type: ignore[operator]
    assert latest_checkpoint(root) == root / step_name(3)


def test_where_all_up_to_latest_are_damaged_a_newer_one_is_named_not_taken(root: Path) -> None:
    (root / LATEST).write_text(step_name(3))
    for step in (1, 2, 3):
        damage(root, step)
    with pytest.raises(CorruptFileError, match=r"To continue from step-00000005, write its name into"):
        latest_checkpoint(root)


def test_a_save_prunes_its_own_past_alone(root: Path) -> None:
    go(root.parent, 7, keep_last=1)
    assert [path.name for path in sorted(root.glob("*step-*"))] == [
        *(f"aside-{step_name(step)}" for step in (4, 6)),
        step_name(7),
    ]


def look_where_rank_0_cannot(ctx: ParallelContext) -> str:
    trainer = SimpleNamespace(config=SimpleNamespace(out="run"), ctx=ctx)
    error = CheckpointError("run/checkpoints: cannot be read")
    with patch("mlm.training.resume.candidates", side_effect=error), pytest.raises(CheckpointError) as raised:
        rewind(trainer)  # type: ignore[arg-type]
    return str(raised.value)


def test_a_folder_that_one_rank_cannot_read_ends_a_rewind_on_all() -> None:
    for line in run_on_ranks(look_where_rank_0_cannot, dp=2):
        assert "run/checkpoints: cannot be read" in line
