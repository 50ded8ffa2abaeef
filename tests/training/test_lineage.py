"""After a roll-back: which checkpoint a run continues from, and which are kept."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mlm.checkpoint.native.folders import LATEST, latest_checkpoint, step_name
from mlm.checkpoint.native.save_load import read_manifest
from mlm.parallel.mesh import shape_context
from mlm.runs.config import CheckpointConfig
from mlm.training.resume import resume
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError
from tests.training.saving import save
from tests.training.test_trainer import config, steps_of


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


def test_the_first_save_after_going_back_sets_the_abandoned_ones_aside(root: Path) -> None:
    names = [path.name for path in sorted(root.glob("*step-*"))]
    assert names == [f"aside-{step_name(step)}" for step in (4, 6)] + [step_name(s) for s in (1, 2, 3, 5)]


def test_where_all_up_to_latest_are_damaged_a_newer_one_is_named_not_taken(root: Path) -> None:
    (root / LATEST).write_text(step_name(3))
    for step in (1, 2, 3):
        damage(root, step)
    with pytest.raises(CorruptFileError, match=r"To continue from step-00000005, write its name into"):
        latest_checkpoint(root)


@pytest.mark.parametrize("place", [0, 6])
def test_latest_that_names_no_checkpoint_is_reported_and_the_newest_continues(
    root: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    content = bytearray((root / LATEST).read_bytes())
    content[place] ^= 1
    (root / LATEST).write_bytes(content)
    assert latest_checkpoint(root) == root / step_name(5)
    assert "latest" in caplog.text
    (root / LATEST).unlink()
    assert latest_checkpoint(root) == root / step_name(5)


def test_a_save_prunes_its_own_past_alone(root: Path) -> None:
    go(root.parent, 7, keep_last=1)
    assert [path.name for path in sorted(root.glob("*step-*"))] == [
        *(f"aside-{step_name(step)}" for step in (4, 6)),
        step_name(7),
    ]
