"""Shell completion: what the shell's scripts get for a line being typed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlm.config.cli.commands import COMMANDS
from mlm.config.cli.groups import task_names
from tests.config.cli.doubles import Cli, make_cli, write

cli = pytest.fixture(make_cli)
TASKS = task_names()
EVALUATIONS = [command.words[1] for command in COMMANDS if command.words[0] == "eval" and command.words[1:]]


@pytest.mark.parametrize(
    "line, expected",
    [
        (
            "mlm ",
            "audit ckpt convert data doctor eval export finetune generate import parity plan pretrain replay "
            "report reshard verify-resume",
        ),
        ("mlm pre", "pretrain"),
        ("mlm pretrain", "pretrain"),
        ("mlm eval ", " ".join(sorted([*TASKS, *EVALUATIONS]))),
        ("mlm eval la", "lambada"),
        ("mlm eval ra", "race race_high race_middle"),
        ("mlm eval race spl", "split="),
        ("mlm finetune ", " ".join(TASKS)),
        ("mlm finetune race data.pr", "data.predict_tests="),
        ("mlm finetune ckpt=a ", " ".join(TASKS)),
        ("mlm pretrain mod", "model. model="),
        ("mlm pretrain model=gpt2_v1", "model=gpt2_v1_2_5b model=gpt2_v1_355m model=gpt2_v1_8_3b"),
        ("mlm pretrain --mod", "--model. --model="),
        ("mlm pretrain --model gpt2_v1_8", "gpt2_v1_8_3b"),
        ("mlm pretrain --model=gpt2_v1_8", "--model=gpt2_v1_8_3b"),
        ("mlm pretrain --multi", "--multirun"),
        ("mlm pretrain -m model=gpt2_8b train.st", "train.steps="),
        (
            "mlm pretrain --tp 2 schedule=c",
            "schedule=constant schedule=cosine schedule=cosine_demo schedule=cosine_v1",
        ),
        ("mlm eval loss --ckpt runs/x preci", "precision. precision="),
        ("mlm pretrain pipel", "pipeline="),
        ("mlm pretrain pipeline=g", "pipeline=gpipe"),
        ("mlm pretrain --config-", "--config-dir"),
        ("mlm nonsense ", ""),
    ],
)
def test_line_completes_to(cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, expected: str) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert cli("-sc query=bash") == 0
    assert (cli.out.strip(), cli.err) == (expected, "")


def test_paths_complete(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("COMP_LINE", "mlm generate ckpt=./ru")
    cli("-sc query=bash")
    assert cli.out.strip() == "ckpt=./runs"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pretrain --config-dir mine model=my", "model=my_model"),
        ("finetune --config-dir mine rev", "reviews"),
        ("eval --config-dir mine rev", "reviews"),
    ],
)
def test_users_folder_completes(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: str
) -> None:
    write(tmp_path / "mine/model/my_model.yaml", "")
    write(tmp_path / "mine/task/reviews.yaml", "")
    monkeypatch.setenv("COMP_LINE", f"mlm {line}")
    cli("-sc query=bash")
    assert cli.out.strip() == expected


@pytest.mark.parametrize("line", ["-sc", "pretrain -sc", "-sc nonsense", "-sc install=tcsh"])
def test_completion_names_its_actions(cli: Cli, line: str) -> None:
    assert cli(line) == 2
    assert "use -sc install=bash" in cli.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_for_a_shell_asks_mlm(cli: Cli, shell: str) -> None:
    assert cli(f"-sc install={shell}") == 0
    assert f"-sc query={shell}" in cli.out or shell == "zsh"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_with_the_installed_script(tmp_path: Path) -> None:
    """The printed script, sourced by a real bash, fills COMPREPLY for `mlm pretrain precision=f<TAB>`."""
    mlm = tmp_path / "mlm"
    mlm.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlm "$@"\n')
    mlm.chmod(0o755)
    script = f"""
        PATH="{tmp_path}:$PATH"
        eval "$(mlm -sc install=bash)"
        COMP_LINE="mlm pretrain precision=f"; COMP_POINT=24; COMP_CWORD=2
        hydra_bash_completion
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["precision=fp16", "precision=fp32", "precision=fp64", "precision=fp8"]
