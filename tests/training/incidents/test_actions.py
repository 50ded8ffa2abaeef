"""Runs with a bad sample: what an incident records, and what each action does to the run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from mlm.data.sampler import first_of_step
from mlm.parallel.collectives import ToHost
from mlm.parallel.mesh import shape_context
from mlm.runs.config import IncidentConfig
from mlm.training import trainer
from mlm.training.incidents import watcher
from tests.training.incidents.bad_data import BAD, Constant
from tests.training.incidents.runs import STEP, folder, incident, losses, pretrain
from tests.training.incidents.runs import watcher as watcher_of
from tests.training.records import records
from tests.training.test_trainer import config


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that returned to a checkpoint."""
    out = tmp_path_factory.mktemp("rewound") / "run"
    assert pretrain(out, "incident.action=rewind") == 0
    return out


def test_an_incident_names_its_sample_settings_and_checkpoint(logged: Path) -> None:
    found = incident(logged)
    assert found["kinds"] == ["loss_outlier"]
    assert found["samples"] == [40, 4]
    assert found["first_outlier"]["sample"] == BAD
    assert found["checkpoint"] == "step-00000008"
    assert found["config"]["optimizer"]["lr"] == 1e-2
    assert f"sample {BAD}" in (folder(logged) / "README.md").read_text()


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


def test_a_rewound_run_continues_from_the_checkpoint_without_the_samples(logged: Path, rewound: Path) -> None:
    ours, theirs = losses(rewound), losses(logged)
    assert [ours[step] == theirs[step] for step in range(1, STEP)] == [True] * (STEP - 1)
    assert max(ours[step] for step in range(STEP, 15)) < 0.01 < theirs[STEP]
    state = json.loads((rewound / "checkpoints" / "step-00000014" / "manifest.json").read_text())["state"]
    assert state["consumed_samples"] == 14 * 4 + 4
    assert state["incidents"]["left_out_samples"] == [[40, 4]]
    assert [record["from"] for record in records(rewound, "rewound")] == [STEP]
    assert [record["step"] for record in records(rewound, "step")] == list(range(1, 15))


@pytest.mark.slow
def test_a_rewound_run_that_is_resumed_is_the_same_run(rewound: Path, tmp_path: Path) -> None:
    out, rewinds = tmp_path / "run", "incident.action=rewind"
    assert pretrain(out, rewinds, "train.steps=10", "schedule.decay_steps=14") == 0
    assert pretrain(out, rewinds, "train.steps=12", "schedule.decay_steps=14") == 0
    assert pretrain(out, rewinds, "schedule.decay_steps=14") == 0
    assert {step: losses(out)[step] for step in range(11, 15)} == {
        step: losses(rewound)[step] for step in range(11, 15)
    }


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
    logged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps have the bits of a run that only logs, however closely it is watched; no folder is kept."""
    out = tmp_path / "run"
    assert pretrain(out, "incident.action=stop", "incident.keep=0", "check.every=1") == 1
    said = capsys.readouterr().err
    assert f"step {STEP}: incident: loss" in said
    assert "Traceback" not in said
    ours, theirs = losses(out), losses(logged)
    assert ours == {step: theirs[step] for step in range(1, STEP)}
    assert not (out / "incidents").exists()


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


@pytest.mark.parametrize(
    "consumed, excluded_samples, expected",
    [
        (0, [(5, 1)], [0, 6, 10]),
        (8, [(4, 4)], [8, 12, 16]),
        (4, [(4, 4), (8, 4)], [12, 16, 20]),
        (0, [(0, 2), (7, 1)], [2, 8, 12]),
    ],
)
def test_batches_touch_no_sample_that_is_left_out(
    consumed: int, excluded_samples: list[tuple[int, int]], expected: list[int]
) -> None:
    assert [first_of_step(consumed, number, 4, excluded_samples) for number in range(3)] == expected


class Bad(Constant):
    """Three bad samples, each of the batch that takes the place of the one before when that is left out."""

    def gather(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
        ids = np.asarray(sample_ids, dtype=np.int64)
        return super().gather(np.where(np.isin(ids, (BAD + 4, BAD + 8)), BAD, ids))


def build(data: object, *, vocab_size: int, num_samples: int, seed: int, validation: bool) -> Bad:
    """The samples that data.kind=tests.training.incidents.test_actions:build names."""
    return Bad(vocab_size, 8, num_samples)


def test_rewinds_to_a_checkpoint_from_before_them_are_counted(tmp_path: Path) -> None:
    """The checkpoint knows of none of them, yet the third of incident.rewinds=2 ends the run."""
    out, kind = tmp_path / "run", f"data.kind={__name__}:build"
    assert pretrain(out, kind, "incident.action=rewind", "incident.rewinds=2") == 1
    assert [record["left_out"] for record in records(out, "rewound")] == [[40, 4], [44, 4]]
    assert max(losses(out)) == STEP - 1


@pytest.mark.slow
def test_each_rewind_leaves_out_the_samples_of_those_before_too(tmp_path: Path) -> None:
    """What earlier ones left out is not in the checkpoint that the run returns to."""
    out, kind = tmp_path / "run", f"data.kind={__name__}:build"
    often = ("checkpoint.save_every=2", "checkpoint.keep_last=4")  # each rewind goes one further back
    assert pretrain(out, kind, "incident.action=rewind", *often) == 0
    state = json.loads((out / "checkpoints" / "step-00000014" / "manifest.json").read_text())["state"]
    assert state["incidents"]["left_out_samples"] == [[40, 4], [44, 4], [48, 4]]
    assert state["consumed_samples"] == 14 * 4 + 3 * 4
