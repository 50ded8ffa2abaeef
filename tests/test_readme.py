"""The commands of the READMEs compose: no key, choice or value in them is unknown."""

import re
import shlex
from pathlib import Path

import pytest

from mlm.cli import main

ROOT = Path(__file__).parents[1]
GUIDES = sorted([*ROOT.glob("mlm/*/README.md"), *ROOT.glob("scripts/**/*.md")])
READMES = (*ROOT.glob("*.md"), *GUIDES)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
MISTAKEN = "optimzer.lr"
"""In the one command that shows what is said of mistakes."""


def commands() -> list[str]:
    """Every `mlm …` typed in a code block; `sbatch …/pretrain.sbatch` stands for `mlm pretrain`."""
    text = "\n".join(readme.read_text() for readme in READMES)
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    lines = [
        line.replace(" …", "").replace("sbatch scripts/slurm/pretrain.sbatch", "mlm pretrain")
        for line in lines
    ]
    return [line for line in lines if re.match(r"mlm [a-z]+ ", line)]


def test_the_readme_shows_every_kind_of_command() -> None:
    shown = {tuple(shlex.split(line, comments=True)[1:3]) for line in commands()}
    for words in ("pretrain", "finetune", "parity", "generate", "plan", "eval", "data"):
        assert any(words in pair for pair in shown), words


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_readme_composes(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if found := re.search(r"resume=(\S+)", line):  # of a run that exists
        run = tmp_path / found[1]
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("name: a\n")
        monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)[1:]
    if "--multirun" in words:  # the first job of the sweep
        words = [word.partition(",")[0] for word in words if word != "--multirun"]
    code = main([*words, "--cfg", "job"] if "--help" not in words else words)
    assert code == (2 if MISTAKEN in line else 0), capsys.readouterr().err


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing
