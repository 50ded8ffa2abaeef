"""profile=true."""

import json
from pathlib import Path

import pytest

from tests.training.incidents.runs import losses, pretrain


def test_a_run_that_ends_before_the_last_profiled_step_has_a_profile_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tracer is closed: one that was left open ended the process with SIGSEGV after its last step."""
    monkeypatch.setenv("MLM_TRUST", "tests")
    assert pretrain(tmp_path / "run", "train.steps=3", "checkpoint.save_every=0", "profile=true") == 0
    assert "profile of 1 step: " in capsys.readouterr().out
    assert (tmp_path / "run" / "profile" / "rank-00000.json").is_file()


@pytest.mark.slow
def test_a_profile_names_the_phases_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLM_TRUST", "tests")
    short = ["train.steps=6", "checkpoint.save_every=0"]
    assert pretrain(tmp_path / "plain", *short) == 0
    assert pretrain(tmp_path / "run", *short, "profile=true") == 0
    said = capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    events = json.loads((tmp_path / "run" / "profile" / "rank-00000.json").read_text())["traceEvents"]
    counted = [
        event["name"] for event in events if event["name"].startswith("mlm: ") and event.get("ph") == "X"
    ]
    assert counted.count("mlm: optimizer") == 3
    assert counted.count("mlm: forward") == counted.count("mlm: backward") == 6
    assert "profile of 3 steps" in said
    assert "  backward " in said
