"""Folders of other users as inputs: one line of the key, and no traceback."""

import os
import shlex
from pathlib import Path

import pytest

import mlm.cli.run
import mlm.launch.start  # noqa: F401 - before a process that may not read the installation
from mlm.cli import main
from tests.slow import slow_but, thinned
from tests.util.as_nobody import as_nobody, open_folder

LINES = ("eval loss ckpt={} path=x", "export hf ckpt={} out=x", "pretrain resume={} out=x")


@pytest.mark.parametrize("line", slow_but({0}, LINES))
@pytest.mark.parametrize("inside", thinned(["", "/checkpoints/step-00000001"], 3))
def test_run_of_another_user_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, inside: str
) -> None:
    monkeypatch.chdir("/")
    with open_folder() as folder:
        run = folder / "run"
        Path(f"{run}{inside}").mkdir(parents=True)
        run.chmod(0o000 if os.geteuid() else 0o700)
        words = shlex.split(line.format(f"{run}{inside}"))
        assert main([*words, "--cfg", "job"]) in (0, 2)  # imports what the command needs
        capfd.readouterr()
        with as_nobody():
            code = main(words)
        said = capfd.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    (about,) = [text for text in said.splitlines() if str(run) in text]
    key = "resume" if "resume" in line else "ckpt"
    assert f"{key}={run}{inside}: permission denied: {run} belongs to " in about
