"""The start of a run: its newest whole checkpoint, passing over damaged ones; a lock; weights alone."""

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm.checkpoint.native.save_load import read_manifest, save_checkpoint
from mlm.checkpoint.parameters import model_shards
from mlm.cli.pretrain.run import start_from_source
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import CheckpointConfig, PretrainConfig
from mlm.training.preflight import run_start_problems
from mlm.training.resume import claim, resume, resume_candidates
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.lock import single_writer
from mlm.util.ownership import claim_folder, owner_of
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
    """A copy of that run, to be damaged."""
    shutil.copytree(straight[0], tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped shard": lambda step: flip(step / "rank-00000.safetensors"),
    "cut shard": lambda step: cut(step / "rank-00000.safetensors"),
    "no shard": lambda step: (step / "rank-00000.safetensors").unlink(),
    "flipped manifest": lambda step: flip(step / "manifest.json"),
    "cut manifest": lambda step: cut(step / "manifest.json"),
    "no manifest": lambda step: (step / "manifest.json").unlink(),
    "stale shard": lambda step: shutil.copy(step.parent / STEPS[0] / "rank-00000.safetensors", step),
}


@pytest.mark.parametrize("damage", slow_but({1}, DAMAGES))
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


@pytest.mark.parametrize("damage", ["flipped shard", "cut shard"])
def test_a_run_does_not_start_afresh_over_damaged_checkpoints(out: Path, damage: str) -> None:
    for step in reversed(STEPS):
        DAMAGES[damage](out / "checkpoints" / step)
    with pytest.raises(CorruptFileError, match=r"(none of 3 checkpoints|no checkpoint) is whole"):
        resume(Trainer(spec(out), shape_context()))


def test_a_damaged_step_that_was_named_has_no_substitute_and_a_run_that_was_named_has(
    out: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = out / "checkpoints" / STEPS[2]
    flip(named / "rank-00000.safetensors")
    with pytest.raises(CorruptFileError, match=f"{STEPS[2]}.*damaged"):
        resume(Trainer(origin(tmp_path / "new", named, "from_run"), shape_context()))
    trainer = Trainer(origin(tmp_path / "new", out, "from_run"), shape_context())
    assert resume(trainer) == out / "checkpoints" / STEPS[1]
    assert STEPS[2] in caplog.text
    assert (trainer.step, trainer.consumed_samples) == (4, 32)


def origin(new: Path, name: Path, key: str) -> PretrainConfig:
    """A run in `new` that begins with `name`: its weights, or all its state."""
    base = spec(new, ckpt=str(name) if key == "ckpt" else None)
    return base if key == "ckpt" else replace(base, checkpoint=replace(base.checkpoint, from_run=str(name)))


@pytest.mark.parametrize("key", ["ckpt", "from_run"])
def test_a_run_s_own_checkpoint_comes_before_the_named_one(out: Path, tmp_path: Path, key: str) -> None:
    assert resume_candidates(origin(out, tmp_path / "not there", key)) == [
        out / "checkpoints" / step for step in reversed(STEPS)
    ]


def test_a_run_continues_in_another_folder_as_in_its_own(
    out: Path, straight: tuple[Path, list[float]], tmp_path: Path
) -> None:
    trainer = Trainer(origin(tmp_path / "new", out, "from_run"), shape_context())
    assert resume(trainer) == out / "checkpoints" / STEPS[2]
    assert steps_of(trainer, 2) == straight[1][6:]
    (change,) = trainer.ancestry.changes
    assert change == {"step": 6, "key": "out", "from": str(out), "to": str(tmp_path / "new")}


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


@pytest.mark.parametrize("key", ["ckpt", "from_run"])
def test_a_run_that_has_begun_is_not_begun_with_something_else(out: Path, tmp_path: Path, key: str) -> None:
    typed = "ckpt" if key == "ckpt" else "resume"
    (error,) = run_start_problems(origin(out, tmp_path / "other", key))
    assert error.startswith(f"{typed}={tmp_path / 'other'}: the run in {out} has begun without {typed}=")
    assert error.endswith(f"continue it by resume={out}, or set another out=…")


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
    assert start is not None
    logging.getLogger("mlm").removeHandler(handler)
    return start.name, messages, steps_of(trainer, 2)


def test_all_ranks_pass_over_what_one_finds_damaged(out: Path, straight: tuple[Path, list[float]]) -> None:
    """Any rank may digest the file; one of them warns."""
    flip(out / "checkpoints" / STEPS[2] / "rank-00000.safetensors")
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
