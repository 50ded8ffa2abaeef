"""The reporter: who speaks, what it writes, what it leaves behind."""

import math
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from mlm.tracking.config import LogConfig
from mlm.tracking.metrics import ExpertLoads, StepMetrics, flatten_metrics
from mlm.util.errors import UserError
from tests.tracking.reporting import read_metrics, reporter, step_metrics


def test_validation_record_holds_the_loss_of_every_corpus(tmp_path: Path) -> None:
    with reporter(tmp_path) as report:
        report.validation(10, 4.5, 90.0, {"wiki": 4.0, "web": math.nan})
    record = read_metrics(tmp_path)[-1]
    assert record.pop("time") > 0
    numbers = {"step": 10, "loss": 4.5, "perplexity": 90.0, "validation/wiki": 4.0, "validation/web": None}
    assert record == {"kind": "validation", **numbers}


def test_numbers_of_an_observer_may_be_tensors(tmp_path: Path) -> None:
    with reporter(tmp_path) as report:
        report.measured(10, {"norm": torch.tensor(1.5), "rate": math.inf, "step": 2, "kind": 3})
    record = read_metrics(tmp_path)[-1]
    assert record.pop("time") > 0
    assert record == {"kind": "measured", "step": 10, "norm": 1.5, "rate": None}


def test_step_record_holds_every_number_and_is_in_the_file_before_the_next(tmp_path: Path) -> None:
    metrics = step_metrics(10, parts={"mlm_loss": 2.5})
    with reporter(tmp_path) as report:
        report.step(metrics)
        _, record = read_metrics(tmp_path)
    assert record.pop("time") > 0
    assert record == {"kind": "step", **flatten_metrics(metrics)}
    assert record["mlm_loss"] == 2.5


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("tp=3: too many; use tp=2"), "tp=3: too many; use tp=2"),
        (RuntimeError("shape [3]\nexpected [4]"), "RuntimeError: shape [3]"),
        (KeyboardInterrupt(), None),
    ],
)
def test_the_error_that_ends_a_run_is_its_last_record(
    tmp_path: Path, error: BaseException, line: str | None
) -> None:
    """Other programs, and `mlm report`, read from it that the run failed, after which step and why."""

    def train() -> None:
        with reporter(tmp_path) as report:
            report.done = 10
            report.step(step_metrics(10))
            report.done = 13
            raise error

    with pytest.raises(type(error)):
        train()
    last = read_metrics(tmp_path)[-1]
    if line is None:
        assert last["kind"] == "step"
    else:
        assert (last["kind"], last["step"], last["error"]) == ("failed", 13, line)


def test_other_ranks_write_and_say_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    with reporter(out, is_main=False, console=None) as report:
        report.step(step_metrics(10))
        report.validation(10, 4.5, 90.0)
        report.note("hello")
        report.saved(10, out, 1.0, 0.0)
    assert not out.exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "config, package",
    [(LogConfig(tensorboard=True), "tensorboard"), (LogConfig(wandb_project="p"), "wandb")],
)
def test_a_missing_tracker_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: LogConfig, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"^log\.{package}.*pip install 'mlm\[{package}\]'"):
        reporter(tmp_path, config=config)


def test_every_field_of_a_step_has_a_row() -> None:
    guide = (Path(__file__).parents[2] / "scripts/docs/pages/guides/runs.md").read_text()
    named = {line.split("`")[1] for line in guide.splitlines() if line.startswith("| `")}
    of_experts = set(ExpertLoads({0: [1]}, {0: [0]}).summary())
    assert {field.name for field in fields(StepMetrics)} - {"parts", "loads"} | of_experts <= named
