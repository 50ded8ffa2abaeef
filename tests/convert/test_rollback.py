"""`mlm ckpt rollback`: where a run continues, what is set aside, and the way forward again."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native.folders import CHECKPOINTS, latest_checkpoint, latest_name, step_name
from mlm.util.lock import single_writer
from tests.checkpoint.native.helpers import save
from tests.checkpoints_on_disk import checkpoint, damage, mlm, shorten, tensors, training_state

Output = pytest.CaptureFixture[str]


def add(run: Path, step: int, past: list[int], value: float = 1.0) -> None:
    """A checkpoint that descends from those of `past`; one of another value is another save."""
    lineage = {"ancestors": [[s, f"id{s}"] for s in past], "changes": []}
    state: dict[str, Any] = {**training_state(step), "lineage": lineage}
    save_id = f"id{step}" + "b" * (value != 1.0)
    save(run / CHECKPOINTS, step, tensors(value), state=state, save_id=save_id, keep_last=99)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints at steps 1 to 5, each a child of the one before."""
    for step in range(1, 6):
        add(tmp_path / "run", step, list(range(1, step)))
    return tmp_path / "run"


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / CHECKPOINTS).glob("*step-*"))


def test_latest_moves_back_and_newer_ones_are_set_aside(run: Path, capsys: Output) -> None:
    before = {path.name: path.stat().st_ino for path in (run / CHECKPOINTS).glob("step-*")}
    assert mlm("ckpt", "rollback", run, "step=3") == 0
    assert latest_checkpoint(run / CHECKPOINTS) == checkpoint(run, 3)
    assert names(run) == [f"aside-{step_name(4)}", f"aside-{step_name(5)}", *map(step_name, (1, 2, 3))]
    assert (run / CHECKPOINTS / f"aside-{step_name(5)}").stat().st_ino == before[step_name(5)]
    assert f"mlm ckpt rollback {run} 5" in capsys.readouterr().out.replace("\n", " ")


def test_it_goes_forward_again_until_training_continues(run: Path, capsys: Output) -> None:
    mlm("ckpt", "rollback", run, "step=2")
    assert mlm("ckpt", "rollback", run, "step=4") == 0
    assert names(run) == [f"aside-{step_name(5)}", *map(step_name, (1, 2, 3, 4))]
    assert latest_name(run / CHECKPOINTS) == step_name(4)
    mlm("ckpt", "rollback", run, "step=2")
    add(run, 3, [1, 2], value=2.0)  # training continues
    assert mlm("ckpt", "rollback", run, "step=5") == 2
    assert "set step=… to one of 1, 2, 3" in capsys.readouterr().err
    assert names(run) == [*(f"aside-{step_name(n)}" for n in (3, 4, 5)), *map(step_name, (1, 2, 3))]


def test_a_full_disk_is_named_with_its_remedy_and_leaves_no_file(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert mlm("ckpt", "rollback", run, "step=3") == 2
    assert "No space left on device: make it writable, or free space there" in capsys.readouterr().err
    assert not list((run / CHECKPOINTS).glob(".latest-*"))


def test_a_second_roll_back_keeps_what_the_first_set_aside(run: Path) -> None:
    mlm("ckpt", "rollback", run, "step=4")
    add(run, 5, [1, 2, 3, 4], value=2.0)
    assert mlm("ckpt", "rollback", run, "step=4") == 0
    assert names(run)[:2] == [f"aside-{step_name(5)}", f"aside-{step_name(5)}-2"]


def test_the_newest_good_one_is_taken_without_a_step(run: Path) -> None:
    shorten(checkpoint(run, 5))
    add(run, 4, [1, 2, 3], value=1e30)
    assert mlm("ckpt", "rollback", run) == 0
    assert latest_name(run / CHECKPOINTS) == step_name(3)


def test_a_latest_one_with_a_flipped_bit_gives_way_to_an_older_one(
    run: Path, capsys: Output, caplog: pytest.LogCaptureFixture
) -> None:
    damage(checkpoint(run, 5))
    assert mlm("ckpt", "rollback", run, "step=5") == 1
    assert f"step=5: {checkpoint(run, 5)}/rank-00000.safetensors: damaged, digest" in capsys.readouterr().err
    assert latest_name(run / CHECKPOINTS) == step_name(5)
    assert mlm("ckpt", "rollback", run) == 0
    assert latest_name(run / CHECKPOINTS) == step_name(4)
    assert f"{checkpoint(run, 5)}/rank-00000.safetensors: damaged" in caplog.text


def test_a_run_that_diverged_goes_back_beyond_the_weights_that_gave_no_finite_number(run: Path) -> None:
    record = {"kind": "diverged", "time": 0, "step": 12, "since": 5, "good": None}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert mlm("ckpt", "rollback", run) == 0
    assert latest_name(run / CHECKPOINTS) == step_name(3)


def test_pruning_keeps_the_checkpoint_that_a_diverged_run_goes_back_to(run: Path) -> None:
    record = {"kind": "diverged", "time": 0, "step": 12, "since": 5, "good": None}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert mlm("ckpt", "prune", run, "keep_last=1") == 0
    assert step_name(3) in names(run)
    assert mlm("ckpt", "rollback", run) == 0
    assert latest_name(run / CHECKPOINTS) == step_name(3)


def test_a_damaged_target_is_rejected_and_nothing_moves(run: Path, capsys: Output) -> None:
    shorten(checkpoint(run, 3))
    assert mlm("ckpt", "rollback", run, "step=3") == 1
    assert "step=3: " in capsys.readouterr().err
    assert latest_name(run / CHECKPOINTS) == step_name(5)


def test_a_step_that_is_not_there_is_a_line_with_those_that_are(run: Path, capsys: Output) -> None:
    assert mlm("ckpt", "rollback", run, "step=9") == 2
    assert capsys.readouterr().err.startswith(
        "mlm ckpt rollback: step=9: no checkpoint to move to; set step=… to one of 1, 2, 3, 4, 5"
    )
    assert mlm("ckpt", "rollback", checkpoint(run, 3)) == 2


def test_a_folder_in_use_is_left_alone(run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlm.util.lock.WAIT_S", 0.0)
    with single_writer(run / CHECKPOINTS):
        monkeypatch.setattr(
            "mlm.cli.ckpt.rollback.single_writer", lambda *a, **k: single_writer(*a, **k, wait_s=0)
        )
        assert mlm("ckpt", "rollback", run, "step=3") == 2
    assert "in use by process" in capsys.readouterr().err
    assert latest_name(run / CHECKPOINTS) == step_name(5)
