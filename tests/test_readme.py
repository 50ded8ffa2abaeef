"""Code blocks of the README, the guides and the site's pages: each is checked, or marked with why not."""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from pip._internal.commands import create_command
from torch.distributed.run import get_args_parser

import mlm
from mlm.cli import main
from mlm.corpus.train_tokenizer import train_wordpiece
from mlm.data.indexed import IndexedWriter, token_dtype
from mlm.evaluate.lm_eval import main as lm_eval
from tests.convert.hf_models import TEXT, add_tokenizer, import_model, make_model
from tests.pages import ROOT, SHELL, Block, blocks, pages
from tests.slow import slow

PAGES = pages()
BLOCKS = [block for page, text in PAGES.items() for block in blocks(text, page)]
QUICK_BLOCKS = [
    block if block.page == "README.md" or number % 3 == 0 else slow(block)
    for number, block in enumerate(BLOCKS)
]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
FILE_NAME = re.compile(r"# (?P<path>[\w./]+\.(?:py|yaml))(?:, for `(?P<command>[^`]+)`)?$")
"""The first line of a block that shows a file, or the one after Hydra's header."""

Words = list[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Things that pages take for granted: a run, a corpus with its tokenizer, and an exported model."""
    folder = tmp_path_factory.mktemp("pages")
    make_model(folder / "source")
    add_tokenizer(folder / "source")
    import_model(folder / "source", folder / "runs/shakespeare", verify=False)
    mlm.export_hf(folder / "runs/shakespeare", folder / "exported", verify=False)
    tokenizer = train_wordpiece(lambda: [TEXT] * 5, 200)
    (folder / "corpus").mkdir()
    tokenizer.save(folder / "corpus")
    ids = tokenizer.encode(TEXT)
    with IndexedWriter(folder / "corpus/train", token_dtype(1000)) as writer:
        for _ in range(50):
            writer.add_document(np.array(ids * 4), [len(ids)] * 4)
    return folder


@pytest.fixture
def desk(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader of the pages, who has trained a model and built a corpus."""
    (tmp_path / "runs").mkdir()
    for name in ("runs/shakespeare", "corpus"):
        (tmp_path / name).symlink_to(trained / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Commands, each as far as it can be checked without its effect.


def compose(words: Words) -> None:
    """`mlm …` composes: no key, choice or value is unknown."""
    for word in words:
        if word.startswith("resume="):  # of a run that exists
            run = Path(word.partition("=")[2])
            run.mkdir(parents=True, exist_ok=True)
            run = run.parents[1] if run.name.startswith("step-") else run
            (run / "config.yaml").write_text("name: a\n")
    is_shown = {"--help", "--version"} & {*words}
    assert main(words if is_shown else [*words, "--cfg", "job"]) == 0


class Parsed(BaseException):
    """Arguments are accepted; the program would start."""


def accepts(program: Callable[[], Any], words: Words) -> None:
    """A program's parser takes its arguments."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> NoReturn:
        parse(parser, *given, **named)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *words])
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed):
            program()


def python(words: Words) -> None:
    """`python SCRIPT …`, `python -m MODULE …`."""
    if words[:1] != ["-m"]:
        accepts(lambda: runpy.run_path(str(ROOT / words[0]), run_name="__main__"), words[1:])
    elif words[1] in ("mlm", "pip"):
        check_command([words[1], *words[2:]])
    elif words[1] == "pytest":
        assert all((ROOT / word).exists() for word in words[2:] if not word.startswith("-"))
    else:
        assert words[1:2] == ["venv"], words
        assert len(words) == 3


def torchrun(words: Words) -> None:
    """The launcher takes its arguments, and what it starts takes the rest."""
    options = get_args_parser().parse_args(words)
    python([*(["-m"] if options.module else []), options.training_script, *options.training_script_args])


@cache
def makefile() -> tuple[set[str], set[str]]:
    """Targets and variables."""
    text = (ROOT / "Makefile").read_text()
    return {*re.findall(r"^([a-z-]+):", text, re.MULTILINE)}, {
        *re.findall(r"^(\w+) [?:]=", text, re.MULTILINE)
    }


def make(words: Words) -> None:
    """Each target exists, and so does each variable."""
    targets, variables = makefile()
    given = {word.partition("=")[0] for word in words if "=" in word}
    assert given <= variables
    assert {word for word in words if "=" not in word} <= targets


def pip(words: Words) -> None:
    """Options are pip's, files exist, and extras are ours."""
    options, wanted = create_command(words[0]).parse_args(words[1:])
    assert all((ROOT / path).exists() for path in getattr(options, "constraints", []))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for words_of_one in wanted:
        one = Requirement(words_of_one.replace(".", "mlm", 1) if words_of_one[0] == "." else words_of_one)
        assert one.name == "mlm"
        assert one.extras <= project["optional-dependencies"].keys()


def sbatch(words: Words) -> None:
    """The script exists, and what it starts composes."""
    started = {"pretrain.sbatch": ["pretrain"], "data_build.sbatch": ["data", "build", "executor=ray"]}
    folder, _, name = words[0].rpartition("/")
    assert folder == "scripts/slurm"
    assert (ROOT / words[0]).exists()
    compose([*started[name], *words[1:]])


def activate(words: Words) -> None:
    """The script of make's virtual environment."""
    assert words == [".venv/bin/activate"]
    assert "VENV := .venv\n" in (ROOT / "Makefile").read_text()


def evaluate(words: Words) -> None:
    """`eval "$(COMMAND)"`: the command in it."""
    (word,) = words
    check_command(shlex.split(word.removeprefix("$(").removesuffix(")")))


def script(words: Words) -> None:
    """A shell script of the repository that bash can read."""
    subprocess.run(["bash", "-n", ROOT / words[0]], check=True)


CHECKS: dict[str, Callable[[Words], None]] = {
    "mlm": compose,
    "mlm-lm-eval": lambda words: accepts(lm_eval, words),
    "make": make,
    "pip": pip,
    "python": python,
    "python3": python,
    "torchrun": torchrun,
    "sbatch": sbatch,
    "bash": script,
    ".": activate,
    "eval": evaluate,
}


def check_command(words: Words) -> None:
    """Check one command; unknown programs are an error."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    name = re.sub(r"^.*/bin/", "", words[0])
    if name not in CHECKS:
        pytest.fail(f"{name!r} is neither checked here nor is its block marked: <!-- not run: why -->")
    CHECKS[name](words[1:])


# Blocks.


def check_shell(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of a shell block is a command that can be checked."""
    for line in block.commands:
        check_command([word for word in shlex.split(line, comments=True) if word != "…"])


def check_transcript(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints what is shown; `…` stands for anything."""
    (line,) = block.commands
    capsys.readouterr()
    main(shlex.split(line)[1:])
    printed = "".join(capsys.readouterr())
    shown = block.code.partition("\n")[2]
    assert re.fullmatch(re.escape(shown).replace("…", ".*"), printed, re.DOTALL), printed


def check_python(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """It is Python; `test_python_of_a_page_runs` runs it."""
    compile(block.code, str(block), "exec")


def check_yaml(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """A mapping; a file of a page composes with the command that its first line names."""
    assert isinstance(yaml.safe_load(block.code), dict)
    found = file_of(block)
    if found and found["command"]:
        for other in BLOCKS:
            if other.page == block.page and (shown := file_of(other)):
                Path(shown["path"]).parent.mkdir(parents=True, exist_ok=True)
                Path(shown["path"]).write_text(other.code)
        check_command(shlex.split(found["command"].replace(" …", "")))


def file_of(block: Block) -> re.Match[str] | None:
    """The name of the file that a block shows; only Hydra's header may precede it."""
    first, _, rest = block.code.partition("\n")
    return FILE_NAME.match(rest.partition("\n")[0] if first.startswith("# @package") else first)


LANGUAGES = {**dict.fromkeys(SHELL, check_shell), "python": check_python, "yaml": check_yaml}


def check_block(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Check a block; one of no known language is an error unless it is marked."""
    if block.reason is not None:
        assert block.reason, f"{block}: the marking gives no reason"
        if block.is_transcript:  # its output is not compared
            check_shell(block, capsys)
        return
    check = check_transcript if block.is_transcript else LANGUAGES.get(block.language)
    if check is None:
        pytest.fail(f"{block}: neither run nor marked; put above it: <!-- not run: why -->")
    check(block, capsys)


@pytest.mark.parametrize("block", QUICK_BLOCKS, ids=str)
def test_a_block_is_checked_or_marked(
    block: Block, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(desk)
    monkeypatch.setenv("COLUMNS", "120")
    check_block(block, capsys)


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.language == "python"}))
def test_python_of_a_page_runs(page: str, desk: Path, trained: Path) -> None:
    code = [block for block in BLOCKS if (block.page, block.language) == (page, "python")]
    run = [block.code for block in code if block.reason is None]
    if "export_hf" not in "".join(run):
        (desk / "exported").symlink_to(trained / "exported")
    names: dict[str, Any] = {"__name__": "page"}
    for text in run:  # on one rank, in place of the two that torchrun starts
        exec(text.replace("build_mesh(tp=2", "build_mesh(tp=1"), names)


def wrong(text: str) -> Block:
    (block,) = blocks(text, "page.md")
    return block


@pytest.mark.parametrize(
    "text",
    [
        "```\nout/checkpoints\n```",
        "```sh\nrm -rf runs\n```",
        "```sh\npip install '.[hf,everything]'\n```",
        "```sh\nmlm pretrain tpp=2\n```",
        "```sh\nsbatch scripts/slurm/pretrain.sbatch modl=gpt2_8b\n```",
        "```\n$ mlm pretrain tp=7\nmlm pretrain: yes\n```",
        "```yaml\n- a: [\n```",
        "<!-- not run: -->\n```\na\n```",
    ],
)
def test_a_wrong_block_is_an_error(
    text: str, desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
        check_block(wrong(text), capsys)


def test_a_marked_block_has_its_reason() -> None:
    assert wrong("<!-- not run: needs a cluster -->\n\n```sh\nsrun x\n```").reason == "needs a cluster"


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files(page: str) -> None:
    folder = (ROOT / page).parent
    assert not [link for link in LINK.findall(PAGES[page]) if not (folder / link).exists()]


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].split()) <= 1300  # words
