"""scripts/torture_commands.py in its short form."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torture_commands
from torture_commands import mutate


def test_mutated_lines_are_a_function_of_the_seed() -> None:
    lines = [mutate(random.Random(f"0-{number}")) for number in range(200)]
    assert lines == [mutate(random.Random(f"0-{number}")) for number in range(200)]
    assert len(set(lines)) > 150  # some lines are short, and mutated alike


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_short_torture_finds_nothing(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, torture_commands.__file__, "--lines", "40", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, json.loads(out.read_text())
