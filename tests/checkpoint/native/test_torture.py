"""scripts/torture_checkpoint.py in its short form: six kills, and each fault once, on one rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[3] / "scripts" / "torture_checkpoint.py"
FAULTS = 24


def test_no_kill_and_no_fault_loses_or_alters_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    words = ["--rounds", "6", "--faults", "1", "--ranks", "1", "--seed", "0", "--out", str(out)]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=230)
    assert out.exists(), done.stderr
    record = json.loads(out.read_text())
    findings = [entry for entry in record["log"] if any(entry["found"].values())]
    assert not findings
    assert (done.returncode, record["checkpoints_lost"], record["silent_corruptions"]) == (0, 0, 0)
    assert record["kills_by_aim"] == {"saving": 2, "loading": 2, "resharding": 2}
    assert record["faults"] == len(record["faults_by_kind"]) == FAULTS
