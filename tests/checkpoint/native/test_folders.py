"""Search for the checkpoint to continue from, and retention."""

import logging
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from mlm.checkpoint.native.folders import LATEST, discard
from mlm.checkpoint.native.format import MANIFEST
from mlm.checkpoint.native.retention import outdated, prune
from mlm.checkpoint.native.save_load import latest_checkpoint, resolve
from mlm.checkpoint.native.staging import StagedFile
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.lock import single_writer
from tests.checkpoint.native.helpers import load, save, weights
from tests.util.as_nobody import NOBODY, as_nobody, open_folder


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, 2, [2, 4, 6]), (2, 3, [3, 5, 6]), (0, 0, [6])],
)
def test_old_checkpoints_are_pruned(tmp_path: Path, keep_last: int, keep_every: int, kept: list[int]) -> None:
    for step in range(1, 7):
        save(tmp_path, step, weights(), keep_last=keep_last, keep_every=keep_every)
    assert steps(tmp_path) == kept


def test_same_step_saved_again_replaces_the_old(tmp_path: Path) -> None:
    save(tmp_path, 1, weights(1.0))
    tensors = weights(0.0)
    load(save(tmp_path, 1, weights(2.0)), tensors)
    assert tensors["w"].mean() == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step-00000001"]


def test_checkpoint_moved_aside_by_a_killed_save_is_found_and_put_back(tmp_path: Path) -> None:
    """Killed between moving step 1 aside and giving its name to the new one."""
    path = save(tmp_path, 1, weights())
    aside = path.rename(tmp_path / ".replaced-step-00000001")
    assert latest_checkpoint(tmp_path) == aside
    save(tmp_path, 2, weights())
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("damage", ["directory", MANIFEST, "rank-00000.safetensors", "truncate"])
def test_latest_that_is_not_whole_gives_way_to_the_newest_whole(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [save(tmp_path, step, weights(), keep_last=9) for step in (1, 2, 3)]
    if damage == "directory":
        shutil.rmtree(paths[2])
    elif damage == "truncate":
        (paths[2] / "rank-00000.safetensors").write_bytes(b"short")
    else:
        (paths[2] / damage).unlink()
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == paths[1]
    assert "step-00000003" in caplog.text
    assert f"continuing from the newest whole checkpoint, {paths[1]}" in caplog.text


@pytest.mark.parametrize("content", ["", "../../elsewhere", "step-1/../..", "\0"])
def test_latest_that_names_no_checkpoint_is_not_followed(tmp_path: Path, content: str) -> None:
    path = save(tmp_path, 1, weights())
    (tmp_path / LATEST).write_text(content)
    assert latest_checkpoint(tmp_path) == path


def test_only_damaged_checkpoints_is_an_error(tmp_path: Path) -> None:
    (save(tmp_path, 1, weights()) / MANIFEST).unlink()
    with pytest.raises(CorruptFileError, match=r"no checkpoint is whole.*manifest.json: missing"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("checkpoints", ["out/checkpoints", "out"])
def test_resolve_takes_what_a_user_would_type(tmp_path: Path, checkpoints: str) -> None:
    root = tmp_path / checkpoints
    old, new = save(root, 1, weights()), save(root, 2, weights())
    given = [old, old / MANIFEST, root, root / LATEST, tmp_path / "out", str(new)]
    assert [resolve(path) for path in given] == [old, old, new, new, new, new]


@pytest.mark.parametrize(("name", "why"), [("absent", "no such directory"), ("empty", "holds no checkpoint")])
def test_resolve_says_how_to_name_a_checkpoint(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=rf"ckpt=.*{name}: {why}.*Set ckpt=… to"):
        resolve(tmp_path / name)


def test_checkpoint_that_latest_names_is_never_outdated_wherever_it_lies(tmp_path: Path) -> None:
    """Killed while it was moved aside: it has another name until the next save puts it back."""
    paths = [save(tmp_path, step, weights(), keep_last=9) for step in (1, 2, 3)]
    (tmp_path / LATEST).write_text("step-00000001")
    paths[0].rename(tmp_path / ".replaced-step-00000001")
    assert outdated(tmp_path, keep_last=1, keep_every=0) == []  # the others are newer


def test_a_checkpoint_of_another_user_is_pruned_whole_or_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    """Its folder may be renamed, and nothing in it deleted: it keeps its name and its files."""
    with open_folder() as root:
        for step in (1, 2, 3):
            save(root, step, weights(), keep_last=9)
        if os.geteuid() == 0:
            os.chown(root, NOBODY, NOBODY)
            os.chown(root / "step-00000001", NOBODY, NOBODY)
        else:
            (root / "step-00000002").chmod(0o555)
        before = sorted(path.name for path in (root / "step-00000002").iterdir())
        with as_nobody():
            prune(root, keep_last=1, keep_every=0)
            assert not discard(root / "step-00000002")
        assert "not deleted: it belongs to " in caplog.text
        assert steps(root) == [2, 3]
        assert sorted(path.name for path in (root / "step-00000002").iterdir()) == before
        assert not list(root.glob(".trash*"))


def test_a_group_keeps_its_rights(tmp_path: Path) -> None:
    """In a shared folder (chmod g+rws) with umask 002, whatever a save writes is the group's to change."""
    tmp_path.chmod(0o2775)
    group = max(os.getgroups() or [os.getgid()])
    os.chown(tmp_path, -1, group)
    before = os.umask(0o002)
    try:
        with single_writer(tmp_path / "checkpoints"):
            path = save(tmp_path / "checkpoints", 1, weights())
        staged = StagedFile()
        staged.fill({"a": torch.zeros(3)}, "b" * 32)
        staged.write(path / "rank-00001.safetensors")
    finally:
        os.umask(before)
    for each in (path.parent, *path.parent.rglob("*")):
        assert each.stat().st_gid == group
        assert each.stat().st_mode & stat.S_IWGRP, each
