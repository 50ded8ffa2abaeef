"""`mlm ckpt inspect`: what the manifest says, and what it does not."""

from pathlib import Path

import pytest
import torch

from mlm.checkpoint.native.save_load import TensorShard, save_checkpoint
from mlm.checkpoint.native.slices import TensorSplit
from mlm.cli import main
from tests.checkpoint.native.helpers import save
from tests.checkpoints_on_disk import checkpoint, damage, mlm, read, training_state, write_run

Output = pytest.CaptureFixture[str]


def test_result_has_these_keys(tmp_path: Path) -> None:
    """Frozen: scripts read them."""
    assert mlm("ckpt", "inspect", write_run(tmp_path / "run"), f"out={tmp_path}/x.json") == 0
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


def test_facts_of_a_training_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    mlm("ckpt", "inspect", run, f"out={tmp_path}/x.json")
    result = read(tmp_path / "x.json")
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


def test_table_says_what_people_ask(tmp_path: Path, capsys: Output) -> None:
    mlm("ckpt", "inspect", write_run(tmp_path / "run"))
    out = capsys.readouterr().out
    assert "384" in out
    assert "tp=2 pp=1" in out
    assert "model.w" not in out


def test_every_tensor_is_listed_when_asked_for(tmp_path: Path, capsys: Output) -> None:
    shard = TensorShard(torch.ones(6, 4), (6, 4), (0, 0), TensorSplit(0, "first", 2))
    save_checkpoint(tmp_path, 1, {"model.w": shard}, state={}, keep_last=1, keep_every=0)
    mlm("ckpt", "inspect", tmp_path, "--tensors")
    out = capsys.readouterr().out
    assert "model.w" in out
    assert "dim 0 over tp by 2 rows, first stage" in out
    assert "rank-00000[0:6, 0:4]" in out


def test_checkpoint_of_weights_alone_is_no_broken_run(tmp_path: Path, capsys: Output) -> None:
    state = {"step": 0, "weights_only": True, "config": training_state(0)["config"]}
    state["source"] = {"kind": "huggingface", "name": "openai-community/gpt2"}
    save(tmp_path, 0, {"model.w": torch.ones(6, 4)}, state=state)
    assert mlm("ckpt", "inspect", tmp_path) == 0
    out = capsys.readouterr().out
    assert "no: weights alone" in out
    assert "name=openai-community/gpt2" in out


@pytest.mark.parametrize(
    "state",
    [{}, {"config": None}, {"config": [1], "consumed_samples": "many", "scaler": 3, "versions": "x"}],
    ids=str,
)
def test_state_of_no_training_run_is_reported_not_raised(tmp_path: Path, state: dict[str, object]) -> None:
    save(tmp_path, 1, {"x": torch.ones(2)}, state=state)
    assert mlm("ckpt", "inspect", tmp_path, f"out={tmp_path}/x.json", "--tensors") == 0
    result = read(tmp_path / "x.json")
    assert (result["consumed_tokens"], result["layout"]) == (None, None)


def test_name_from_a_checkpoint_cannot_steer_the_terminal(tmp_path: Path, capsys: Output) -> None:
    versions = {"mlm": "\x1b[31mred\n\ud800"}
    save(tmp_path, 1, {"model.[bold]w": torch.ones(2)}, state={"versions": versions})
    assert mlm("ckpt", "inspect", tmp_path, "--tensors") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"mlm=\x1b[31mred\n\ud800" in out
    assert "model.[bold]w" in out


@pytest.mark.parametrize("out", ["absent/x.json", "run"])
def test_out_that_cannot_be_written_is_found_first(tmp_path: Path, capsys: Output, out: str) -> None:
    run = write_run(tmp_path / "run")
    assert mlm("ckpt", "inspect", run, f"out={tmp_path / out}") == 2
    assert capsys.readouterr().err.startswith(f"mlm ckpt inspect: out={tmp_path / out}: ")


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
