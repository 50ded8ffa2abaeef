"""Mistakes on the command line: one line each with the fix, exit code 2, nothing started.

The wording of the command line's own messages is tested here, and elsewhere the key that they name.
"""

from pathlib import Path

import pytest

from mlm.cli import outcome
from mlm.cli.commands import COMMANDS
from mlm.cli.compose.groups import task_names
from mlm.launch.rules.layout import Launch
from mlm.util.errors import UserError
from tests.cli.doubles import Cli, make_cli, write
from tests.slow import thinned

cli = pytest.fixture(make_cli)
SOUND = "pretrain model=gpt2_tiny data=synthetic"
EVALUATIONS = ", ".join(
    command.words[1] for command in COMMANDS if command.words[0] == "eval" and command.words[1:]
)


@pytest.mark.parametrize(
    "line, message",
    thinned(
        [
            ("pretrian", "mlm: unknown command 'pretrian'; did you mean 'pretrain'? (list: mlm --help)"),
            ("sample", "mlm: unknown command 'sample'; did you mean 'generate'? (list: mlm --help)"),
            ("eval ckpt=a", f"mlm eval: name a task: {EVALUATIONS}, {', '.join(task_names())}"),
            (
                "finetune rac ckpt=a",
                "mlm finetune: task=rac: no such choice; did you mean race? (list: mlm finetune --help)",
            ),
            ("data", "mlm data: name a task: tokenizer, build, merge, split, inspect, verify"),
            ("import megatron", "mlm import: unknown task 'megatron'; did you mean 'mlm convert'?"),
            (
                "generate ckpt=. prompt=a seq_length=4096",
                "mlm generate: unknown key 'seq_length'; --help lists the keys",
            ),
            (
                "plan layouts parallel=sc21_1t",
                "mlm plan layouts: 'parallel' is a section: set its keys, such as tp=…",
            ),
            (
                "eval lambada ckpt=. data.path=texts",
                "mlm eval lambada: data.path=texts is a folder; name a file in it",
            ),
        ],
        2,
    ),
)
def test_mistake_in_a_command_is_one_line(cli: Cli, tmp_path: Path, line: str, message: str) -> None:
    write(tmp_path / "texts/a.jsonl", "")
    assert cli(line) == 2
    assert cli.err == f"{message}\n"


@pytest.mark.parametrize(
    "words, message",
    thinned(
        [
            ("-x", "unknown flag '-x' (list: mlm pretrain --help)"),
            ("--cfg jop", "--cfg jop: no such choice; did you mean 'job'?"),
            ("--cfg", "--cfg needs a value: job"),
            ("--config-dir nowhere", "--config-dir=nowhere: no such folder; name one laid out like configs/"),
            ("modle.hidden_size=1", "unknown key 'modle.hidden_size'; did you mean 'model.hidden_size'?"),
            ("train=9", "'train' is a section: set its keys, such as train.steps=…"),
            ("tp", "cannot read 'tp': expected key=value; did you mean tp=…?"),
            (
                "config/mine.py",
                "cannot read 'config/mine.py': no file of settings is read; write your settings to "
                "DIR/experiment/NAME.yaml and type --config-dir DIR experiment=NAME",
            ),
            (
                "hydra.run.dir=x",
                "hydra.run.dir=x: mlm composes with Hydra and runs without it; leave it out; own YAML is "
                "--config-dir",
            ),
            # values
            ("tp=x", "tp=x must be a whole number"),
            (
                "'optimizer.betas=(0.9,0.95)'",
                "cannot read 'optimizer.betas=(0.9,0.95)': optimizer.betas must be a list of 2 numbers, such "
                "as 'optimizer.betas=[0.9,0.999]'",
            ),
            ("pipeline=1f2b", "pipeline=1f2b must be 1f1b, gpipe or zb_h1; did you mean pipeline=1f1b?"),
            (
                f"data.path={'x' * 300}",
                f"data.path={'x' * 40}…: a name of 300 bytes is too long for a file system; shorten it",
            ),
            (
                "'out=${oc.env:NOT_SET}'",
                r"out: Environment variable 'NOT_SET' not found; correct ${…}, or write \${…} for text",
            ),
            # choices of groups
            (
                "model.num_kv_heads=2",
                "unknown key 'model.num_kv_heads'; a part of Llama, Mistral and Qwen (model=llama3_8b, …): "
                "model.options.num_kv_heads",
            ),
            (
                "model=gpt2_9b",
                "model=gpt2_9b: no such choice; did you mean gpt2_8b? (list: mlm pretrain --help)",
            ),
            ("tp=1,2", "tp=1,2: more than one value; start a run for each, or quote the value"),
            # names of other programs
            ("block_size=8", "unknown key 'block_size'; did you mean 'data.seq_length'?"),
            ("--dry-run", "unknown key 'dry_run'; --check checks the settings, and starts nothing"),
        ],
        3,
    ),
)
def test_mistake_in_a_setting_is_one_line(cli: Cli, words: str, message: str) -> None:
    assert cli(f"{SOUND} {words}") == 2
    assert cli.err == f"mlm pretrain: {message}\n"
    assert cli.launched.configs == []


@pytest.mark.parametrize("key", ["tp", "hydra/env"])
@pytest.mark.parametrize("value", ["9" * 600, "'" + "a b " * 150 + "'"], ids=["word", "words"])
def test_long_value_is_shortened(cli: Cli, key: str, value: str) -> None:
    """The problem, which stands first, and the fix, which stands last, stay legible."""
    assert cli(f'{SOUND} "{key}={value}"') == 2
    assert cli.err.count("\n") == 1
    assert "…" in cli.err
    assert value not in cli.err
    assert len(cli.err) < 650


def test_home_of_no_user_is_one_line(cli: Cli) -> None:
    assert cli("pretrain resume=~nobody-of-this-name") == 2
    assert cli.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        (
            "pretrain sed=1 precision=fp12 compile=x tp=5 data.seq_length=9999",
            [
                "unknown key 'sed'",
                "precision=fp12:",
                "compile=x",
                "tp=5",
                "data.seq_length=9999",
                "data.path ",
            ],
        ),
        ("pretrain data=sinthetic model=gpt2_tinny tp=3", ["data=sinthetic:", "model=gpt2_tinny:"]),
    ],
)
def test_all_problems_come_in_one_report_but_those_that_follow(
    cli: Cli, line: str, starts: list[str]
) -> None:
    """What follows from a misspelling, such as tp=3 not fitting the default model, is left out."""
    assert cli(line) == 2
    lines = [text.partition(": ")[2] for text in cli.err.splitlines()]
    assert [text[: len(start)] for text, start in zip(lines, starts, strict=True)] == starts
    assert cli.launched.configs == []


def test_broken_yaml_and_unknown_keys_in_it_are_named(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "mine/model/broken.yaml", "a: [1\n")
    assert cli("pretrain -cd mine model=broken") == 2
    assert cli.err.count("\n") == 1
    assert "mine/model/broken.yaml" in cli.err
    write(tmp_path / "mine/train/x.yaml", "step: 3\n")
    assert cli(f"{SOUND} -cd mine train=x") == 2
    assert "unknown key 'train.step'" in cli.err


def test_surroundings_that_make_no_sense_are_one_problem_among_others(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def facts(launched: object) -> Launch:
        raise UserError("WORLD_SIZE=x is not a number")

    monkeypatch.setattr(type(cli.launched), "facts", property(facts), raising=False)
    assert cli(f"{SOUND} tp=3") == 2
    assert [line.split()[2] for line in cli.err.splitlines()] == ["WORLD_SIZE=x", "tp=3"]


def test_preflight_is_asked_before_anything_starts(cli: Cli) -> None:
    cli.launched.preflight = ["a.bin is truncated", "b is absent"]
    assert cli(SOUND) == 2
    assert cli.err == "mlm pretrain: a.bin is truncated\nmlm pretrain: b is absent\n"
    assert cli.launched.configs == []


@pytest.mark.parametrize("rank, lines", [("0", 1), ("3", 0)])
def test_one_rank_of_a_host_reports(cli: Cli, monkeypatch: pytest.MonkeyPatch, rank: str, lines: int) -> None:
    monkeypatch.setattr(outcome, "HEAD_START_S", 0)
    for name, value in {"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    assert cli(f"{SOUND} sed=1") == 2
    assert cli.err.count("\n") == lines
