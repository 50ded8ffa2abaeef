"""scripts/torture_files.py and torture_commands.py in their short forms, and what they call a finding."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torture.command_lines import mutate
from torture.flips import Flip, Outcome, judge

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome(0, "", "result"), "equal"),
        (Outcome(0, "", "other"), "SILENTLY DIFFERENT"),
        (Outcome(0, "warning: run/latest is damaged", "other"), "told"),
        (Outcome(2, "run/latest: damaged", None), "rejected"),
        (Outcome(1, "Traceback (most recent call last):\nKeyError", None), "traceback"),
        (Outcome(-9, "", None), "exit code -9"),
    ],
)
def test_flip_verdict_is(outcome: Outcome, verdict: str) -> None:
    flip = Flip("run/latest", 3)
    judge(flip, "generate", outcome, Outcome(0, "", "result"))
    assert flip.verdicts == {"generate": verdict}
    assert bool(flip.wrong) == (verdict not in ("equal", "told", "rejected"))


def test_mutated_lines_are_a_function_of_the_seed() -> None:
    lines = [mutate(random.Random(f"0-{number}")) for number in range(200)]
    assert lines == [mutate(random.Random(f"0-{number}")) for number in range(200)]
    assert len(set(lines)) > 150  # some lines are short, and mutated alike


@pytest.mark.slow
@pytest.mark.timeout(480)  # each flip is several commands
@pytest.mark.parametrize(
    "words", [("torture_files.py", "--flips", "12"), ("torture_commands.py", "--lines", "25")]
)
def test_short_torture_finds_nothing(words: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, str(SCRIPTS / words[0]), *words[1:], "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(out.read_text())
    assert done.returncode == 0, found
