"""scripts/torture_checkpoint.py in its short form: six kills, and each fault once, on one rank."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[3] / "scripts" / "torture_checkpoint.py"
FAULTS = 24


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The script's JSON record."""
    out = tmp_path_factory.mktemp("torture") / "record.json"
    words = ["--rounds", "6", "--faults", "1", "--ranks", "1", "--seed", "0", "--out", str(out)]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=230)
    assert out.exists(), done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert (done.returncode == 0) == (not findings(found))
    return found


def findings(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [r for r in record["log"] if any(r["found"].values())]


def test_every_round_took_place(record: dict[str, Any]) -> None:
    assert record["kills_by_aim"] == {"saving": 2, "loading": 2, "resharding": 2}
    assert record["faults"] == len(record["faults_by_kind"]) == FAULTS


@pytest.mark.parametrize("what", ["checkpoints_lost", "silent_corruptions"])
def test_no_checkpoint_is_lost_or_wrong(record: dict[str, Any], what: str) -> None:
    assert record[what] == 0, findings(record)


def test_nothing_else_is_found(record: dict[str, Any]) -> None:
    assert not findings(record)
