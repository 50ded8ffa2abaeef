"""scripts/torture_checkpoint.py in its short form: kills that write, and faults of each mechanism."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[3] / "scripts" / "torture_checkpoint.py"
AIMS = [
    # four in one process, then those of tp=2
    *("resharding", "flip checkpoints/step-00000003/*.safetensors", "disk full", "checkpoints deleted"),
    *("saving", "two runs in one folder"),
]


@pytest.mark.timeout(1200)
def test_no_kill_and_no_fault_loses_or_alters_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    words = ["--out", str(out), "--aims", *AIMS]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    findings = ("checkpoints_lost", "silent_corruptions", "other_findings")
    assert [record[name] for name in findings] == [0, 0, 0]
    assert list(record["by_aim"]) == AIMS
