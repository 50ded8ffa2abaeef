"""The summary of a run: its numbers, its files, and commands that can be typed."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from mlm.tracking import history
from mlm.tracking.summary import NextCommands, override, write_summary
from tests.tracking.reporting import reporter, step_metrics

COMMAND = ["mlm", "pretrain", "resume=runs/shakespeare"]
HEADER = [("model", "gpt2, 6 layers"), ("layout", "tp=2 pp=1 dp=1")]

STARTED = {
    "command": ["mlm", "pretrain", "experiment=shakespeare", "tp=2", "name=a b"],
    "host": "node7",
    "folder": "/work",
}

Summarise = Callable[..., str]


@pytest.fixture
def summarise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Summarise:
    """Run up to `done` of 100 steps and return the summary's text."""
    now = iter(range(1000, 10_000))
    monkeypatch.setattr(history.time, "time", lambda: float(next(now)))

    def run(
        done: int = 100,
        prompt: str | None = "The king",
        started: dict[str, Any] = STARTED,
        **options: Any,
    ) -> str:
        out = tmp_path / "shakespeare"
        with reporter(out, run={"config_digest": "xxh3:12", **started}) as report:
            for step in range(10, done + 1, 10):
                report.step(step_metrics(step, loss=5 - step / 100, tokens_per_s=1000.0 + step))
            report.validation(done, 4.2, 66.69)
        (out / "checkpoints").mkdir()
        options = {"prompt": prompt, "validation": ["corpus/validation"], **options}
        commands = NextCommands(resume=COMMAND, total_steps=100, **options)
        return write_summary(out, commands, header=HEADER).read_text()

    return run


def shell_lines(text: str) -> list[list[str]]:
    """Words of each command in the shell block."""
    block = text.partition("```sh\n")[2].partition("\n```")[0]
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def test_the_summary_says_what_ran_and_what_came_of_it(summarise: Summarise) -> None:
    text = summarise()
    parts = (
        "# shakespeare\n",
        "Finished: 100 of 100 steps.",
        "| layout | tp=2 pp=1 dp=1 |",
        "`xxh3:12`",
        "| command | `mlm pretrain experiment=shakespeare tp=2 'name=a b'` |",
        "| started | 1970-01-01 00:16:40 UTC on node7 in /work |",
        "| tokens seen | 100,000 |",
        "| time, h:mm:ss | 0:00:11 |",
        "| training loss | 4.0000 nats per token at step 100 |",
        "| validation perplexity | 66.69 |",
        "| tokens/s of all ranks (median) | 1,055 |",
        "| MFU (median) | 42.0% |",
        "| `checkpoints` |",
        "| `metrics.jsonl` |",
    )
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("done", [50, 100])
def test_every_command_can_be_typed(summarise: Summarise, tmp_path: Path, done: int) -> None:
    text = summarise(done)
    lines = shell_lines(text)
    assert f"{'Finished' if done == 100 else 'Stopped early'}: {done} of 100 steps." in text
    assert done == 100 or lines[0] == COMMAND
    assert [words[1] for words in lines] == ["pretrain", "eval", "generate", "report"]
    parser = OverridesParser.create()
    for words in lines[:3]:
        parser.parse_overrides([word for word in words[2:] if word != "loss"])
    assert lines[1] == ["mlm", "eval", "loss", f"ckpt={tmp_path / 'shakespeare'}"]
    assert lines[2] == ["mlm", "generate", f"ckpt={tmp_path / 'shakespeare'}", "prompt=The king"]
    assert lines[3] == ["mlm", "report", str(tmp_path / "shakespeare")]


@pytest.mark.parametrize("decays", [True, False])
def test_a_finished_run_is_extended(summarise: Summarise, decays: bool) -> None:
    """mlm pretrain rejects schedule.decay_steps where nothing would read it."""
    longer = [*COMMAND, "train.steps=200", *["schedule.decay_steps=100"] * decays]
    assert shell_lines(summarise(decays=decays))[0] == longer


def test_without_a_validation_set_or_tokenizer_nothing_is_scored_or_generated(summarise: Summarise) -> None:
    text = summarise(validation=[], prompt=None)
    assert "mlm eval" not in text
    assert "mlm generate" not in text


def test_a_family_of_the_users_own_is_trusted_by_the_commands_that_load_it(summarise: Summarise) -> None:
    lines = shell_lines(summarise(trusted="my_pkg.families"))[:3]
    assert [words[0] for words in lines] == ["mlm", "MLM_TRUST=my_pkg.families", "MLM_TRUST=my_pkg.families"]


def test_every_attempt_is_listed_with_its_command(summarise: Summarise, tmp_path: Path) -> None:
    assert "| job of the sweep | `lr=1e-3` |" in summarise(50, started={**STARTED, "job": "lr=1e-3"})
    out, again = tmp_path / "shakespeare", {"command": ["mlm", "pretrain", "resume=runs/a"], "host": "node8"}
    with reporter(out, start_step=50, run={**again, "launcher": "SLURM job 12"}) as report:
        report.step(step_metrics(60))
    text = write_summary(out, NextCommands(resume=COMMAND, total_steps=100), header=HEADER).read_text()
    assert "| command | `mlm pretrain experiment" in text
    assert "| command after step 50 | `mlm pretrain resume=runs/a` |" in text
    assert "UTC on node8 by SLURM job 12 |" in text


def test_an_accuracy_has_no_unit_of_a_loss(summarise: Summarise, tmp_path: Path) -> None:
    summarise()
    out = tmp_path / "shakespeare"
    with reporter(out, start_step=100) as report:
        report.validation(100, 4.2, 66.69, {"mlm_loss": 2.5, "mlm_accuracy": 0.4})
    commands = NextCommands(resume=COMMAND, total_steps=100)
    text = write_summary(out, commands, header=HEADER, unit="nats, both heads").read_text()
    assert "| validation loss of mlm | 2.5000 nats |" in text
    assert "| validation mlm accuracy | 0.4000 |" in text


@pytest.mark.parametrize(
    "value", ["runs/a", "a b", "To be, or not", 'say "no"', "it's $HOME", "a\\", "line\nline"]
)
def test_an_override_survives_the_shell(value: str) -> None:
    assert shlex.split(override("prompt", value)) == [f"prompt={value}"]
