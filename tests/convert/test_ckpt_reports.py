"""`mlm ckpt inspect`, `diff` and `verify`: what they report, in which words, and with which exit code."""

import os
from pathlib import Path

import pytest
import torch

from mlm.checkpoint.native.folders import CHECKPOINTS, LATEST
from mlm.checkpoint.native.save_load import TensorShard, save_checkpoint
from mlm.checkpoint.native.slices import TensorSplit
from mlm.cli import main
from mlm.parallel.config import ParallelConfig
from tests.checkpoint.native.helpers import save
from tests.checkpoints_on_disk import (
    checkpoint,
    damage,
    mlm,
    read,
    tensors,
    training_state,
    write_run,
)
from tests.util.as_nobody import as_nobody, open_folder

Output = pytest.CaptureFixture[str]


def test_result_of_inspect_has_these_keys_and_facts(tmp_path: Path) -> None:
    """The keys are frozen: scripts read them."""
    run = write_run(tmp_path / "run")
    assert mlm("ckpt", "inspect", run, f"out={tmp_path}/x.json") == 0
    result = read(tmp_path / "x.json")
    assert list(result) == [
        *("task", "path", "format", "step", "consumed_samples", "consumed_tokens", "model", "layout"),
        *("resharded_to", "loss_scale", "bytes", "groups", "files", "tensors", "state", "config"),
        *("written_by", "save_id", "digest", "versions"),
    ]
    assert list(result["model"]) == [
        *("kind", "num_layers", "hidden_size", "num_heads", "vocab_size", "parameters")
    ]
    assert list(result["tensors"]["model.w"]) == ["shape", "dtype", "split", "pieces"]
    assert result["path"] == str(checkpoint(run, 3))
    assert (result["step"], result["consumed_samples"], result["consumed_tokens"]) == (3, 24, 24 * 16)
    assert (result["layout"]["tp"], result["loss_scale"]) == (2, 2.0)
    assert result["groups"]["optimizer.exp_avg"] == {
        **{"tensors": 1, "elements": 24, "bytes": 96},
        "dtypes": ["F32"],
    }
    assert result["model"]["parameters"] == 24
    assert result["config"] == training_state(3)["config"]
    assert result["bytes"] == (checkpoint(run, 3) / "rank-00000.safetensors").stat().st_size


def test_every_tensor_is_listed_when_asked_for(tmp_path: Path, capsys: Output) -> None:
    shard = TensorShard(torch.ones(6, 4), (6, 4), (0, 0), TensorSplit(0, "first", 2))
    save_checkpoint(tmp_path, 1, {"model.w": shard}, state={}, keep_last=1, keep_every=0)
    mlm("ckpt", "inspect", tmp_path, "--tensors")
    out = capsys.readouterr().out
    assert "model.w" in out
    assert "dim 0 over tp by 2 rows, first stage" in out
    assert "rank-00000[0:6, 0:4]" in out


def test_name_from_a_checkpoint_cannot_steer_the_terminal(tmp_path: Path, capsys: Output) -> None:
    versions = {"mlm": "\x1b[31mred\n\ud800"}
    save(tmp_path, 1, {"model.[bold]w": torch.ones(2)}, state={"versions": versions})
    assert mlm("ckpt", "inspect", tmp_path, "--tensors") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"mlm=\x1b[31mred\n\ud800" in out
    assert "model.[bold]w" in out


def test_commands_as_typed_end_as_they_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", value=2.0)
    damage(checkpoint(b, 1))
    out = tmp_path / "out.json"
    for line, code in (
        (f"ckpt inspect {a} --tensors --out {out}", 0),
        (f"ckpt verify ckpt={b}", 1),
        (f"ckpt diff {a} {b} out={out}", 1),
        (f"ckpt prune {a} --keep-last 1", 0),
    ):
        assert main(line.split()) == code, line
        captured = capsys.readouterr()
        assert captured.out
        assert captured.err.count("\n") == code, line
    assert read(out)["task"] == "ckpt diff"
    assert [path.name for path in (a / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_result_of_diff_has_these_keys_and_one_line(tmp_path: Path, capsys: Output) -> None:
    """Frozen: scripts read them."""
    other = tensors()
    other["model.w"][2, 3] = -7.0
    a, b = save(tmp_path / "a", 1, tensors()), save(tmp_path / "b", 1, other)
    assert mlm("ckpt", "diff", a, b, f"out={tmp_path}/x.json") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "1 of 3 tensors differ, model.w most: by 8.0e+00, 1.1e+00 of its largest element" in line
    result = read(tmp_path / "x.json")
    assert list(result) == [
        *("task", "first", "second", "equal", "state", "only_first", "only_second", "forms", "tensors"),
        "versions",
    ]
    assert list(result["first"]) == ["path", "step", "digest"]
    assert result["tensors"][0] == {
        **{"name": "model.w", "differing": 1, "elements": 24},
        **{"largest": 8.0, "scale": 7.0, "relative": 8 / 7},
    }


def test_equal_tensors_end_with_0_and_settings_that_differ_are_listed(tmp_path: Path, capsys: Output) -> None:
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", seed=7, parallel=ParallelConfig(tp=4))
    assert mlm("ckpt", "diff", a, b, f"out={tmp_path}/x.json") == 0
    assert read(tmp_path / "x.json")["state"] == {
        "config.seed": {"first": 1234, "second": 7},
        "config.parallel.tp": {"first": 2, "second": 4},
    }
    assert "all 3 tensors are equal bit for bit" in capsys.readouterr().out


def test_folders_of_a_sweep_are_paths(tmp_path: Path) -> None:
    """They hold `=`, as key=value does."""
    a, b = (write_run(tmp_path / f"optimizer.lr={lr}") for lr in ("0.0003", "0.001"))
    assert main(["ckpt", "diff", str(a), str(b)]) == 0
    assert main(["ckpt", "inspect", str(a), f"out={tmp_path}/x.json"]) == 0


def test_result_of_verify_has_these_keys(tmp_path: Path) -> None:
    """Frozen: scripts read them."""
    run = write_run(tmp_path / "run")
    damage(checkpoint(run, 2))
    assert mlm("ckpt", "verify", run, f"out={tmp_path}/x.json") == 1
    result = read(tmp_path / "x.json")
    assert list(result) == ["task", "ckpt", "whole", "continues_from", "checkpoints", "versions"]
    assert list(result["checkpoints"][0]) == [
        *("path", "whole", "step", "files", "bytes", "digest", "exact", "problems")
    ]
    assert list(result["checkpoints"][1]["problems"][0]) == ["file", "why"]


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


@pytest.mark.parametrize("folder", ["", "best"])
@pytest.mark.parametrize("content", [None, "step-00000009", "rubbish"])
def test_latest_that_leads_nowhere_is_damage_of_a_run_and_of_its_best(
    tmp_path: Path, capsys: Output, folder: str, content: str | None
) -> None:
    run = write_run(tmp_path / "run")
    write_run(run / "best", steps=(2,))
    latest = run / folder / CHECKPOINTS / LATEST
    latest.unlink()
    latest.mkdir() if content is None else latest.write_text(content)
    assert mlm("ckpt", "verify", run, f"out={tmp_path}/x.json") == 1
    assert f"mlm ckpt verify: {latest} " in capsys.readouterr().err
    assert read(tmp_path / "x.json")["whole"] is False


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


def test_a_shard_of_another_user_is_not_damaged(capfd: Output) -> None:
    with open_folder() as folder:
        run = write_run(folder / "run")
        (checkpoint(run, 2) / "rank-00000.safetensors").chmod(0o600 if os.geteuid() == 0 else 0)
        with as_nobody():
            assert mlm("ckpt", "verify", run) == 2
    err = capfd.readouterr().err
    shard = f"{checkpoint(run, 2)}/rank-00000.safetensors"
    assert f"1 of 3 checkpoints is not readable: {shard}: cannot be read: Permission denied. Ask" in err
