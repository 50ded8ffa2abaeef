"""`mlm data build` deletes and replaces only what it wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlm.config.cli import main
from mlm.corpus.build import preflight, run_build, sole_build
from mlm.util.errors import UserError
from mlm.util.ownership import MARKER
from tests.corpus.texts import plain, quiet, write_jsonl

TEXTS = ["the cat sat", "é on the mat", "a hat", "the rat", "sat in the hat", "that cat"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text beside the working directory."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    write_jsonl(tmp_path / "text" / "train.jsonl", TEXTS)
    return tmp_path / "text"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def build(source: Path, **options: Any) -> Any:
    return run_build(plain(source, **options), quiet())


def rejected(source: Path, **options: Any) -> str:
    """The lines with which both the preflight and the build reject these folders."""
    with pytest.raises(UserError) as raised:
        build(source, **options)
    lines = preflight(plain(source, **options))
    assert lines
    return "\n".join([*lines, str(raised.value)])


def test_work_folder_of_the_users_keeps_what_is_in_it(source: Path) -> None:
    mine = source.parent / "s"
    write_jsonl(mine / "deep" / "thesis.jsonl", ["mine"])
    before = contents(mine)
    build(source, work=str(mine))
    assert contents(mine) == before


def test_work_folder_is_left_whole_by_a_build_that_is_up_to_date(source: Path) -> None:
    build(source)
    mine = source.parent / "s"
    write_jsonl(mine / "thesis.jsonl", ["mine"])
    build(source, work=str(mine))
    assert (mine / "thesis.jsonl").exists()


def test_work_in_the_input_folder_is_rejected(source: Path) -> None:
    before = contents(source)
    assert "is the input" in rejected(source, work=str(source))
    assert "holds out=" in rejected(source, work=str(source.parent))
    assert contents(source) == before


def test_work_equal_to_out_is_rejected_and_keeps_the_corpus(source: Path) -> None:
    build(source)
    out = source.parent / "out"
    before = contents(out)
    assert "is out=" in rejected(source, work=str(out))
    assert contents(out) == before


def test_a_projects_own_work_folder_is_kept(source: Path) -> None:
    mine = source.parent / "out" / "work" / "chapter1.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert "holds work, which mlm did not write" in rejected(source)
    assert mine.read_text() == "mine"


def test_work_as_a_link_loses_neither_the_link_nor_its_target(source: Path) -> None:
    target = source.parent / "scratch"
    write_jsonl(target / "thesis.jsonl", ["mine"])
    (source.parent / "s").symlink_to(target)
    build(source, work=str(source.parent / "s"))
    assert (source.parent / "s").is_symlink()
    assert (target / "thesis.jsonl").exists()


def test_out_with_files_of_the_users_in_the_way_is_rejected(source: Path) -> None:
    out = source.parent / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")
    assert "holds tokenizer.json, which mlm did not write" in rejected(source)
    assert contents(out) == {"tokenizer.json": b"{}"}


def test_out_that_holds_the_tokenizer_alone_is_taken(source: Path) -> None:
    """`mlm data tokenizer out=corpus`, then `mlm data build tokenizer=corpus out=corpus`."""
    out = source.parent / "out"
    out.mkdir()
    (out / "tokenizer.json").write_bytes(Path(plain(source).tokenizer).read_bytes())
    build(source)
    assert (out / "corpus.json").exists()


def test_two_builds_into_one_out_are_kept_apart_whatever_their_work(source: Path) -> None:
    build(source)
    out, before = source.parent / "out", contents(source.parent / "out")
    hold = (
        "import sys; from pathlib import Path; from mlm.corpus.build import sole_build\n"
        "with sole_build(Path(sys.argv[1]), 'x'): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hold, str(out / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=r"^out=.* is in use by another `mlm data build`"):
        build(source, work=str(source.parent / "other"))
    process.communicate("")
    assert contents(out) == before


@pytest.mark.parametrize("stands", ["fifo", "link", "folder"])
def test_a_lock_that_is_no_plain_file_is_an_error_and_no_hang(tmp_path: Path, stands: str) -> None:
    lock, target = tmp_path / ".lock", tmp_path / "precious"
    target.write_text("mine")
    {"fifo": os.mkfifo, "link": lambda p: p.symlink_to(target), "folder": Path.mkdir}[stands](lock)
    with pytest.raises(OSError, match=r"regular file|symbolic links|directory"), sole_build(lock, "out=x"):
        pass
    assert target.read_text() == "mine"
    assert os.path.lexists(lock)


def test_command_rejects_the_users_folder_before_it_reads(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = source.parent / "proj"
    (out / "work").mkdir(parents=True)
    (out / "work" / "main.c").write_text("mine")
    tokenizer = plain(source).tokenizer
    assert main(["data", "build", f"input={source}", f"tokenizer={tokenizer}", f"out={out}"]) == 2
    said = f"mlm data build: out={out}: holds work, which mlm did not write; name a new folder\n"
    assert capsys.readouterr().err == said
    assert list(contents(out)) == ["work/main.c"]


def test_receipt_and_marker_agree_that_the_folder_is_ours(source: Path) -> None:
    build(source)
    assert json.loads((source.parent / "out" / MARKER).read_text())["kind"] == "corpus"


def test_tokenizer_replaces_no_file_of_the_users_and_reads_nothing_first(
    source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, mine = ["data", "tokenizer", f"input={source}", "vocab_size=300"], source.parent / "mine.json"
    mine.write_text('{"mine": 1}')
    assert main([*words, f"out={mine}"]) == 2
    said = f"mlm data tokenizer: out={mine}: exists and is not a tokenizer; name another file, or delete it\n"
    assert capfd.readouterr().err == said
    assert mine.read_text() == '{"mine": 1}'
    for _ in range(2):  # the same again
        assert main([*words, f"out={source.parent / 'corpus'}"]) == 0
    capfd.readouterr()
    assert main([*words, "out=-"]) == 0
    assert capfd.readouterr().out == (source.parent / "corpus" / "tokenizer.json").read_text()
