"""`mlm data build` deletes and replaces only what it wrote."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlm.util.errors import UserError
from tests.corpus.texts import TEXTS, build, output, plain, write_jsonl


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text beside the working directory."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    write_jsonl(tmp_path / "text" / "train.jsonl", TEXTS)
    return tmp_path / "text"


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
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=r"^out=.* is in use by another `mlm data build`"):
        build(plain(source))
    process.communicate("")
    assert output(out) == before
