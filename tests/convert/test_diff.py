"""`mlm ckpt diff`: what differs, in which words, and with which exit code."""

import math
from pathlib import Path

import pytest
import torch

from mlm.cli import main
from mlm.parallel.config import ParallelConfig
from tests.checkpoint.native.helpers import save, save_unchecked
from tests.checkpoints_on_disk import mlm, read, tensors, write_run

Output = pytest.CaptureFixture[str]


def test_result_has_these_keys(tmp_path: Path) -> None:
    """Frozen: scripts read them."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", value=2.0)
    assert mlm("ckpt", "diff", a, b, f"out={tmp_path}/x.json") == 1
    result = read(tmp_path / "x.json")
    assert list(result) == [
        *("task", "first", "second", "equal", "state", "only_first", "only_second", "forms", "tensors"),
        "versions",
    ]
    assert list(result["first"]) == ["path", "step", "digest"]
    assert result["tensors"][0] == {
        **{"name": "model.w", "differing": 24, "elements": 24},
        **{"largest": 1.0, "scale": 2.0, "relative": 0.5},
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


def test_difference_ends_with_1_and_one_line(tmp_path: Path, capsys: Output) -> None:
    other = tensors()
    other["model.w"][2, 3] = -7.0
    a, b = save(tmp_path / "a", 1, tensors()), save(tmp_path / "b", 1, other)
    assert mlm("ckpt", "diff", a, b) == 1
    err = capsys.readouterr().err
    assert "1 of 3 tensors differ, model.w most: by 8.0e+00, 1.1e+00 of its largest element" in err
    assert err.count("\n") == 1


def test_tensors_of_one_side_and_other_shapes_are_reported(tmp_path: Path, capsys: Output) -> None:
    a = save(tmp_path / "a", 1, tensors() | {"model.old": torch.ones(1)})
    b = save(tmp_path / "b", 1, tensors() | {"model.w": torch.ones(3)})
    assert mlm("ckpt", "diff", a, b, f"out={tmp_path}/x.json") == 1
    result = read(tmp_path / "x.json")
    assert result["only_first"] == ["model.old"]
    assert result["forms"] == [{"name": "model.w", "first": "F32 [6, 4]", "second": "F32 [3]"}]
    captured = capsys.readouterr()
    assert "model.old" in captured.out
    assert "1 have another shape or dtype; 1 are only in the first, 0 in the second" in captured.err


def test_infinite_difference_is_null_in_json(tmp_path: Path) -> None:
    a = save(tmp_path / "a", 1, {"x": torch.ones(2)})
    b = save_unchecked(tmp_path / "b", 1, {"x": torch.tensor([1.0, math.nan])})
    assert mlm("ckpt", "diff", a, b, f"out={tmp_path}/x.json") == 1
    assert read(tmp_path / "x.json")["tensors"][0]["largest"] is None


def test_side_that_is_not_there_is_named_by_its_key(tmp_path: Path, capsys: Output) -> None:
    assert mlm("ckpt", "diff", write_run(tmp_path / "a"), tmp_path / "b") == 2
    assert f"second={tmp_path / 'b'}: no such directory. Set second=… to" in capsys.readouterr().err


def test_folders_of_a_sweep_are_paths(tmp_path: Path) -> None:
    """They hold `=`, as key=value does."""
    a, b = (write_run(tmp_path / f"optimizer.lr={lr}") for lr in ("0.0003", "0.001"))
    assert main(["ckpt", "diff", str(a), str(b)]) == 0
    assert main(["ckpt", "inspect", str(a), f"out={tmp_path}/x.json"]) == 0
