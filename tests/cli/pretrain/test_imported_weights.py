"""A run that begins with weights of Megatron-LM: its model, and the errors on the way there."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlm.cli import main
from mlm.cli.convert.run import run as convert
from mlm.convert.config import ConvertConfig
from tests.convert.dcp.llamas import write_torch_dist
from tests.convert.megatron.written import VOCAB, arguments, gpt2_state, random_gpt2

SHORT = [
    *("train.steps=1", "train.global_batch_size=2", "train.micro_batch_size=2", "train.validate_batches=1"),
    *("schedule=constant", "schedule.warmup_steps=0", "dist.device=cpu"),
    "dist.peak_tflops=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`theirs`, a checkpoint of Megatron-LM at iteration 7, and `ours`, its conversion."""
    root = tmp_path_factory.mktemp("imported")
    write_torch_dist(root / "theirs", gpt2_state(random_gpt2()), arguments())
    source, out = str(root / "theirs"), str(root / "ours")
    convert(ConvertConfig(source=source, out=out, vocab_size=VOCAB))
    return root


def saved_model(out: Path) -> dict[str, Any]:
    (manifest,) = out.glob("checkpoints/step-*/manifest.json")
    model: dict[str, Any] = json.loads(manifest.read_text())["state"]["config"]["model"]
    return model


def test_run_that_names_no_model_takes_the_checkpoints(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["pretrain", f"ckpt={folder / 'ours'}", "data=synthetic", f"out={out}", *SHORT]) == 0
    taken = "gpt2, 4 layers, hidden size 32, 4 heads"
    err = capsys.readouterr().err
    assert err.startswith(f"mlm pretrain: model of ckpt={folder / 'ours'}: {taken}\nmlm pretrain: needs ")
    assert saved_model(out) == saved_model(folder / "ours")


@pytest.mark.parametrize("chosen", ["model=gpt2_tiny", "model.num_layers=2"])
def test_model_that_is_chosen_stays(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], chosen: str
) -> None:
    words = [f"ckpt={folder / 'ours'}", "data=synthetic", f"out={tmp_path / 'run'}", chosen, *SHORT]
    assert main(["pretrain", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()  # one, however many keys differ
    assert "the weights in" in line
    assert "set model.num_layers=4" in line


def test_weights_alone_are_no_run_to_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", f"resume={folder / 'ours'}"]) == 2
    assert capsys.readouterr().err.endswith(f"begin a run with them: ckpt={folder / 'ours'} out=…\n")


@pytest.mark.parametrize("command", ["pretrain data=synthetic", "eval lambada data.path=x", "generate"])
def test_checkpoint_of_megatron_is_imported_first(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([*command.split(), f"ckpt={folder / 'theirs'}", "dist.device=cpu"]) == 2
    said = f"ckpt={folder / 'theirs'}: a Megatron-LM checkpoint; run `mlm convert {folder / 'theirs'} "
    assert said in capsys.readouterr().err
