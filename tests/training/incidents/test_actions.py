"""Runs with a bad sample: what an incident records, and what each action does to the run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.parallel.collectives import ToHost
from mlm.parallel.mesh import shape_context
from mlm.runs.config import IncidentConfig
from mlm.training import trainer
from mlm.training.incidents import watcher
from tests.training.incidents.bad_data import BAD
from tests.training.incidents.runs import STEP, folder, incident, losses, pretrain
from tests.training.incidents.runs import watcher as watcher_of
from tests.training.records import records
from tests.training.test_trainer import config


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLM_TRUST", "tests")


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose incident is only logged."""
    out = tmp_path_factory.mktemp("logged") / "run"
    assert pretrain(out) == 0
    return out


def test_an_incident_names_its_sample_settings_and_checkpoint(logged: Path) -> None:
    found = incident(logged)
    assert found["kinds"] == ["loss_outlier"]
    assert found["samples"] == [40, 4]
    assert found["first_outlier"]["sample"] == BAD
    assert found["checkpoint"] == "step-00000008"
    assert found["config"]["optimizer"]["lr"] == 1e-2
    assert f"sample {BAD}" in (folder(logged) / "README.md").read_text()


def test_looking_changes_no_bit_of_the_run(logged: Path, tmp_path: Path) -> None:
    assert pretrain(tmp_path / "run", "incident.threshold=0", "check.every=1") == 0
    assert losses(tmp_path / "run") == losses(logged)
    assert not (tmp_path / "run" / "incidents").exists()


@pytest.mark.slow
def test_a_skipped_update_is_that_of_the_incident_alone(logged: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert pretrain(out, "incident.action=skip", "train.steps=10", "schedule.decay_steps=14") == 0
    assert pretrain(out, "incident.action=skip", "schedule.decay_steps=14") == 0  # resumes
    ours, theirs = losses(out), losses(logged)
    assert [ours[step] == theirs[step] for step in range(1, STEP + 2)] == [True] * STEP + [False]
    state = json.loads((out / "checkpoints" / "step-00000014" / "manifest.json").read_text())["state"]
    assert state["incidents"]["left_out_steps"] == [STEP]
    assert state["applied_steps"] == 13


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The update is applied before its numbers are read, as on a GPU: the order of both."""
    order: list[str] = []
    read, apply = ToHost.read, trainer.apply

    def noted_read(self: ToHost) -> list[float]:
        order.append("read")
        return read(self)

    def noted_apply(*args: Any) -> None:
        order.append("apply")
        apply(*args)

    monkeypatch.setattr(watcher, "DEFERRING", ("cpu",))
    monkeypatch.setattr(ToHost, "read", noted_read)
    monkeypatch.setattr(trainer, "apply", noted_apply)
    return order


def test_a_gpu_applies_the_update_before_the_host_reads(
    logged: Path, tmp_path: Path, deferred: list[str]
) -> None:
    """Only that of the incident is applied after it was judged; the run has the same bits."""
    assert pretrain(tmp_path / "run") == 0
    assert losses(tmp_path / "run") == losses(logged)
    assert incident(tmp_path / "run")["exact"] == incident(logged)["exact"]
    usual = ["apply", "read"]
    assert deferred == usual * STEP + ["apply"] + usual * (14 - STEP)


def test_a_stopped_run_ends_with_1_and_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain(tmp_path / "run", "incident.action=stop") == 1
    said = capsys.readouterr().err
    assert f"step {STEP}: incident: loss" in said
    assert "Traceback" not in said
    assert max(losses(tmp_path / "run")) == STEP - 1


def test_no_more_incidents_are_kept_than_asked_for(tmp_path: Path) -> None:
    assert pretrain(tmp_path / "run", "incident.keep=0") == 0
    assert not (tmp_path / "run" / "incidents").exists()
    assert [record["folder"] for record in records(tmp_path / "run", "incident")] == [None]


def test_outliers_leave_half_of_the_places_to_what_is_worse(tmp_path: Path) -> None:
    spec = replace(config(), incident=IncidentConfig(keep=4))
    incidents = watcher_of(trainer.Trainer(spec, shape_context()), tmp_path)
    for kind in ["gradient_outlier"] * 5 + ["slow_rank", "replicas_differ", "gradient_not_finite"]:
        incidents.report(kind, "a line")
    kept = sorted((tmp_path / "incidents").glob("*/incident.json"))
    kinds = [json.loads(path.read_text())["kinds"][0] for path in kept]
    assert sorted(kinds) == ["gradient_not_finite", "gradient_outlier", "gradient_outlier", "replicas_differ"]


def test_a_full_disk_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("mlm.training.incidents.watcher.write_atomic", full)
    assert pretrain(tmp_path / "run") == 0
    assert max(losses(tmp_path / "run")) == 14
