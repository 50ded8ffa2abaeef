"""`mlm data build` deletes and replaces only what it wrote."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.corpus.build import preflight
from mlm.util.errors import UserError
from tests.corpus.texts import TEXTS, build, output, plain, write_jsonl


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text beside the working directory."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    write_jsonl(tmp_path / "text" / "train.jsonl", TEXTS)
    return tmp_path / "text"


def test_a_projects_own_work_folder_is_kept(source: Path) -> None:
    mine = source.parent / "out" / "work" / "chapter1.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    problem = "holds work, which mlm did not write"
    with pytest.raises(UserError, match=problem):
        build(plain(source))
    assert problem in "\n".join(preflight(plain(source)))
    assert mine.read_text() == "mine"


def test_out_that_holds_the_tokenizer_alone_is_taken(source: Path) -> None:
    """`mlm data tokenizer out=corpus`, then `mlm data build tokenizer=corpus out=corpus`."""
    out = source.parent / "out"
    out.mkdir()
    (out / "tokenizer.json").write_bytes(Path(plain(source).tokenizer).read_bytes())
    build(plain(source))
    assert (out / "corpus.json").exists()


def test_two_builds_into_one_out_are_kept_apart(source: Path) -> None:
    build(plain(source))
    out, before = source.parent / "out", output(source.parent / "out")
    hold = (
        "import sys; from pathlib import Path; from mlm.corpus.build import sole_build\n"
        "with sole_build(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hold, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=r"^out=.* is in use by another `mlm data build`"):
        build(plain(source))
    process.communicate("")
    assert output(out) == before


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
