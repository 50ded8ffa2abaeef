"""scripts/torture_stop.py: one rank told to stop between prompts, and a request before a time limit."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torture_stop.py"
CELLS = ("pretrain/pp=2/prompts/rank TERM", "classify/dp=1/saving/launcher USR1")


@pytest.mark.slow
def test_what_a_signal_stops_is_saved_and_continues_to_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run([sys.executable, str(SCRIPT), *CELLS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(": ")[2].split(" | ")[0] for line in done.stdout.splitlines()[:2]] == ["fine", "fine"]
