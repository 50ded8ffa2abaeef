"""The command line as it was typed reaches the record of a run."""

import json
import os

import pytest

from mlm.launch.stop import LAUNCHED
from mlm.launch.typed import COMMAND, LONGEST, note_job, origin, typed_as

WORDS = ["pretrain", "model=gpt2_tiny", "name=it's"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (COMMAND, LAUNCHED, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def test_the_words_are_known_as_long_as_the_command_runs() -> None:
    with typed_as(WORDS):
        note_job("seed=1")
        run = origin()
        assert (run["command"], run["job"]) == (["mlm", *WORDS], "seed=1")
        assert run["folder"] == os.getcwd()
    assert "command" not in origin()


def test_a_batch_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert origin()["launcher"] == "SLURM job 12"


def test_a_line_too_long_for_the_environment_is_not_noted() -> None:
    with typed_as(["x" * LONGEST]):
        assert COMMAND not in os.environ


def test_what_another_program_left_in_the_variable_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "[", json.dumps(["mlm"])):
        monkeypatch.setenv(COMMAND, value)
        assert "command" not in origin()
