"""The command line as it was typed reaches the record of a run."""

import json
import os

import pytest

from mlm.launch.command_line import (
    COMMAND,
    LONGEST,
    record_command_line,
    record_job,
    run_origin,
    typed_settings,
)
from mlm.launch.stop import LAUNCHED

WORDS = ["pretrain", "model=gpt2_tiny", "name=it's"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (COMMAND, LAUNCHED, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def test_the_words_are_known_as_long_as_the_command_runs() -> None:
    with record_command_line(WORDS):
        record_job(["model=gpt2_tiny", "seed=1"])
        run = run_origin()
        assert run["command"] == ["mlm", *WORDS]
        assert typed_settings() == ["model=gpt2_tiny", "seed=1"]
        assert run["folder"] == os.getcwd()
    assert "command" not in run_origin()
    assert typed_settings() == []


def test_a_line_too_long_for_the_environment_is_not_noted() -> None:
    with record_command_line(["x" * LONGEST]):
        assert COMMAND not in os.environ


def test_a_batch_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert run_origin()["launcher"] == "SLURM job 12"


def test_what_another_program_left_in_the_variable_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "[", json.dumps(["mlm"])):
        monkeypatch.setenv(COMMAND, value)
        assert "command" not in run_origin()
