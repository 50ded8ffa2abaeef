"""`mlm ckpt verify`: one checkpoint or all of a run, and from which a run would continue."""

import os
from pathlib import Path

import pytest

from mlm.checkpoint.native.folders import CHECKPOINTS, LATEST
from mlm.checkpoint.native.format import NotFiniteError
from tests.checkpoint.native.helpers import save
from tests.checkpoints_on_disk import (
    checkpoint,
    damage,
    mlm,
    read,
    shorten,
    tensors,
    write_run,
)
from tests.util.as_nobody import as_nobody, open_folder

Output = pytest.CaptureFixture[str]


def test_result_has_these_keys(tmp_path: Path) -> None:
    """Frozen: scripts read them."""
    run = write_run(tmp_path / "run")
    damage(checkpoint(run, 2))
    assert mlm("ckpt", "verify", run, f"out={tmp_path}/x.json") == 1
    result = read(tmp_path / "x.json")
    assert list(result) == ["task", "ckpt", "whole", "continues_from", "checkpoints", "versions"]
    assert list(result["checkpoints"][0]) == [
        *("path", "whole", "step", "files", "bytes", "digest", "problems")
    ]
    assert list(result["checkpoints"][1]["problems"][0]) == ["file", "why"]


def test_whole_run_ends_with_0(tmp_path: Path, capsys: Output) -> None:
    run = write_run(tmp_path / "run")
    assert mlm("ckpt", "verify", run) == 0
    assert f"a run continues from {checkpoint(run, 3)}" in capsys.readouterr().out.replace("\n", " ")


def test_all_of_a_run_are_verified_and_the_first_damaged_is_named(tmp_path: Path, capsys: Output) -> None:
    run = write_run(tmp_path / "run", steps=(1, 2, 3, 4))
    damage(checkpoint(run, 2))
    shorten(checkpoint(run, 3))
    assert mlm("ckpt", "verify", run, f"out={tmp_path}/x.json") == 1
    found = read(tmp_path / "x.json")["checkpoints"]
    assert [(each["step"], each["whole"]) for each in found] == [
        *((1, True), (2, False), (3, False), (4, True))
    ]
    err = capsys.readouterr().err
    assert err.startswith(
        f"mlm ckpt verify: 2 of 4 checkpoints are damaged: {checkpoint(run, 2)}/rank-00000.safetensors: "
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["model.w", "optimizer.exp_avg.w"])
def test_a_state_kept_aside_is_named_not_finite(tmp_path: Path, capsys: Output, name: str) -> None:
    bad = tensors()
    bad[name][2, 1] = float("nan")
    with pytest.raises(NotFiniteError):
        save(tmp_path, 2, bad)
    assert mlm("ckpt", "verify", tmp_path / "not-finite-step-00000002") == 1
    assert f"not finite: {name}. Go back to one that is whole with" in capsys.readouterr().err


def test_the_best_checkpoint_of_a_finetuned_run_is_verified_too(tmp_path: Path, capsys: Output) -> None:
    run = write_run(tmp_path / "run")
    best = write_run(run / "best", steps=(2,))
    assert mlm("ckpt", "verify", run) == 0
    assert "best: step-00000002" in capsys.readouterr().out
    damage(checkpoint(best, 2))
    assert mlm("ckpt", "verify", run, f"out={tmp_path}/x.json") == 1
    found = read(tmp_path / "x.json")
    assert [each["whole"] for each in found["checkpoints"]] == [True, True, True, False]
    assert found["continues_from"] == str(checkpoint(run, 3))


@pytest.mark.parametrize(
    ("latest", "damaged", "continues"), [(3, (), 3), (1, (), 1), (3, (3,), 2), (2, (2, 3), 1)]
)
def test_run_continues_from_what_latest_names_else_the_newest_before_it_that_loads(
    tmp_path: Path, latest: int, damaged: tuple[int, ...], continues: int
) -> None:
    run = write_run(tmp_path / "run")
    (run / CHECKPOINTS / LATEST).write_text(f"step-{latest:08d}")
    for step in damaged:
        damage(checkpoint(run, step))
    mlm("ckpt", "verify", run, f"out={tmp_path}/x.json")
    assert read(tmp_path / "x.json")["continues_from"] == str(checkpoint(run, continues))


def test_stale_shard_is_damage_but_a_run_continues(tmp_path: Path) -> None:
    """Loading never opens it."""
    run = write_run(tmp_path / "run")
    (checkpoint(run, 3) / "rank-00001.safetensors").touch()
    assert mlm("ckpt", "verify", run, f"out={tmp_path}/x.json") == 1
    assert read(tmp_path / "x.json")["continues_from"] == str(checkpoint(run, 3))


def test_a_shard_of_another_user_is_not_damaged(capfd: Output) -> None:
    with open_folder() as folder:
        run = write_run(folder / "run")
        (checkpoint(run, 2) / "rank-00000.safetensors").chmod(0o600 if os.geteuid() == 0 else 0)
        assert as_nobody(lambda: mlm("ckpt", "verify", run)) == 2
    err = capfd.readouterr().err
    shard = f"{checkpoint(run, 2)}/rank-00000.safetensors"
    assert f"1 of 3 checkpoints is not readable: {shard}: cannot be read: Permission denied. Ask" in err
