"""`mlm replay` of planted errors of one and of several ranks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mlm.checkpoint.native.folders import step_name
from mlm.checkpoint.native.save_load import read_manifest
from mlm.cli import main
from mlm.config.build import from_dict
from mlm.parallel.mesh import shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.state import load
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from tests.training.incidents.bad_data import BAD, Constant
from tests.training.incidents.runs import STEP, folder, incident, pretrain
from tests.training.saving import save

Said = pytest.CaptureFixture[str]
EXPERTS = ("model.kind=llama", "model.activation=silu", "model.options={num_experts: 4, expert_ffn_size: 32}")


def test_a_replay_of_one_process_has_the_same_bits_and_finds_the_sample(logged: Path, capsys: Said) -> None:
    assert main(["replay", str(folder(logged)), "dist.threads_per_rank=1"]) == 0
    said = capsys.readouterr().out
    assert f"step {STEP} of {logged}, replayed from {logged}/checkpoints/step-00000008\n" in said
    assert "(equal bit for bit)" in said
    assert f"the first outlier is the input of layers.0.mlp.down, sample {BAD}" in said
    assert "precision=" not in said


def test_the_runs_own_dataset_is_followed_as_its_error_says(
    logged: Path, capfd: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLM_TRUST")
    words = ["replay", str(folder(logged)), "dist.threads_per_rank=1"]
    kind = "data.kind=tests.training.incidents.bad_data:build"
    assert main([*words, "data.kind=tests.training.incidents.bad_data:other"]) == 2
    assert f"if you trust it, type {kind} or" in capfd.readouterr().err
    assert main([*words, kind]) == 0
    assert "(equal bit for bit)" in capfd.readouterr().out


def test_a_replay_checks_the_runs_own_code_before_it_starts(
    logged: Path, tmp_path: Path, capfd: Said
) -> None:
    record = incident(logged)
    record["config"]["optimizer"]["kind"] = "torch.optim:SGD"
    record["config"]["schedule"]["decay"] = "mine:decay"
    copy = tmp_path / "run/incidents/step-00000011"
    copy.mkdir(parents=True)
    (copy / "incident.json").write_text(json.dumps(record))
    assert main(["replay", str(copy)]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[2].rstrip(":") for line in lines] == [
        "optimizer.kind=torch.optim:SGD",
        "schedule.decay=mine:decay",
    ]


@pytest.mark.slow
def test_a_replay_of_several_ranks_finds_the_same_sample(tmp_path: Path, capfd: Said) -> None:
    out = tmp_path / "run"
    assert pretrain(out, "dp=2", "ep=2", *EXPERTS) == 0
    assert main(["replay", str(folder(out)), "dist.device=cpu", "precision=fp64"]) == 0
    said = capfd.readouterr().out
    # float32 sums in another order
    near = pytest.approx(incident(out)["numbers"]["loss"], rel=1e-5)
    assert f"sample {BAD}" in said
    for words in ("now:  loss", "precision=fp64: loss"):
        assert float(said.split(words)[1].split(",")[0]) == near


def small(data: object, *, vocab_size: int, num_samples: int, seed: int, validation: bool) -> Constant:
    """The samples that data.kind=tests.training.incidents.test_replay:small names."""
    if num_samples > 48 and not validation:
        raise UserError(f"48 samples are there, not {num_samples}")
    return Constant(vocab_size, 8, num_samples)


def test_a_replay_in_a_ramp_of_the_batch_asks_for_no_more_samples_than_the_run(
    tmp_path: Path, capsys: Said
) -> None:
    """24 steps of two samples each, the 21st of which reads sample 41."""
    out, ramp = tmp_path / "run", ("train.ramp_batch=[2,2,1000]", "train.steps=24", "checkpoint.save_every=0")
    assert pretrain(out, f"data.kind={__name__}:small", *ramp) == 0
    assert main(["replay", str(folder(out, 21)), "dist.threads_per_rank=1"]) == 0
    assert "(equal bit for bit)" in capsys.readouterr().out


def replayed(out: Path, capsys: Said) -> str:
    """The first line of a replay with equal bits, or its error."""
    capsys.readouterr()
    code = main(["replay", str(folder(out)), "dist.threads_per_rank=1"])
    said = capsys.readouterr()
    assert code == 2 or "(equal bit for bit)" in said.out
    return said.out.splitlines()[0] if code == 0 else said.err


@pytest.mark.slow
def test_a_replay_starts_from_an_ancestor_wherever_it_is(tmp_path: Path, capsys: Said) -> None:
    """Step 8 is trained again with other settings; the incident descends from the one that is set aside."""
    out, words = tmp_path / "run", ("checkpoint.save_every=4", "schedule.decay_steps=14")
    assert pretrain(out, *words) == 0
    assert main(["ckpt", "rollback", str(out), "4"]) == 0
    assert pretrain(out, *words, "train.steps=8", "optimizer.lr=1e-3") == 0
    checkpoints = out / "checkpoints"
    assert (checkpoints / step_name(8)).is_dir()
    aside = checkpoints / f"aside-{step_name(8)}"
    assert f"replayed from {aside}" in replayed(out, capsys)
    shutil.rmtree(aside)
    assert f"replayed from {checkpoints / step_name(4)}" in replayed(out, capsys)
    shutil.rmtree(checkpoints / step_name(4))
    assert "replayed from initial weights" in replayed(out, capsys)


@pytest.mark.slow
def test_a_replay_starts_from_no_state_before_a_change_of_settings(tmp_path: Path, capsys: Said) -> None:
    out, words = tmp_path / "run", ("checkpoint.save_every=2", "schedule.decay_steps=14")
    assert pretrain(out, *words, "train.steps=6") == 0
    assert pretrain(out, *words, "optimizer.lr=5e-3", "train.steps=14") == 0
    checkpoints = out / "checkpoints"
    for step in (8, 10, 12, 14):
        shutil.rmtree(checkpoints / step_name(step))
    assert f"replayed from {checkpoints / step_name(6)}" in replayed(out, capsys)
    shutil.rmtree(checkpoints / step_name(6))
    assert f"no checkpoint is left in {checkpoints} that it descends from" in replayed(out, capsys)


def test_an_incident_beside_a_save_in_flight_descends_from_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert pretrain(out, "checkpoint.asynchronous=true", "checkpoint.save_every=5") == 0
    manifest = json.loads((out / "checkpoints" / step_name(10) / "manifest.json").read_text())
    assert incident(out)["lineage"]["ancestors"][-1] == [10, manifest["save_id"]]


@pytest.mark.slow
def test_an_overflow_of_one_layer_in_float16_is_named_and_float32_has_none(
    tmp_path: Path, capsys: Said
) -> None:
    out, scale = tmp_path / "run", "precision.initial_loss_scale=1"
    half = ["precision=fp16", scale, "precision.min_loss_scale=1", "incident.patience=3"]
    assert pretrain(out, *half, "train.steps=2", "schedule.decay_steps=14") == 0
    path = out / "checkpoints" / step_name(2)
    spec = from_dict(PretrainConfig, dict(read_manifest(path).state["config"]))
    spec = replace(spec, checkpoint=replace(spec.checkpoint, keep_last=1))
    trainer: Trainer = Trainer(spec, shape_context())
    load(trainer, path)
    with torch.no_grad():  # activations of layer 1 beyond float16, which float32 holds
        trainer.model.chunks[0].layers["1"].mlp.up.bias.fill_(1e5)
    save(trainer, out)
    capsys.readouterr()
    code = pretrain(out, *half, "schedule.decay_steps=14", "log.every=100")
    said = capsys.readouterr().err
    assert code == 1
    assert "overflow at the smallest loss scale, 1" in said
    assert "3 steps in a row without finite gradients" in said
    assert "gradients still overflow at precision.min_loss_scale=1" in said
    assert main(["replay", str(folder(out, 3)), "dist.threads_per_rank=1"]) == 0
    said = capsys.readouterr().out
    assert "(not a number again)" in said
    mine, _, beside = said.partition("precision=fp32: ")
    assert "the first number that is not finite is in the output of layers.1.mlp.up" in mine
    assert "not finite" not in beside


def test_a_folder_that_is_no_incident_is_a_mistake(tmp_path: Path, capsys: Said) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "holds no incident.json" in capsys.readouterr().err
    for content in ("{", "[]"):
        (tmp_path / "incident.json").write_text(content)
        assert main(["replay", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("memory", {}, "its state of incidents is of another version"),
        ("step", None, "its record is damaged"),
        ("lineage", {"ancestors": [[4, "?"]]}, "its record is damaged"),
    ],
)
def test_a_damaged_value_of_a_whole_record_ends_with_1(
    key: str, value: object, line: str, logged: Path, tmp_path: Path, capsys: Said
) -> None:
    record = json.loads((folder(logged) / "incident.json").read_text())
    (tmp_path / "incident.json").write_text(json.dumps({**record, key: value}))
    assert main(["replay", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path}: {line}" in said
    assert "Traceback" not in said
