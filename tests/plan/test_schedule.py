"""`mlm plan schedule` from the command line to its files."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from mlm.parallel.pipeline.actions import Plan
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.schedule import run
from mlm.util.errors import UserError


def ran(**settings: Any) -> tuple[Plan, str]:
    """The plan and what was printed."""
    with redirect_stdout(io.StringIO()) as printed:
        plan = run(PlanScheduleConfig(**settings))
    return plan, printed.getvalue()


def test_picture_and_numbers_are_printed() -> None:
    _, text = ran(vp=2)
    assert text.startswith("interleaved 1F1B · pp=4 vp=2 micro_batches=8\n\nrank 0  F0")
    assert "bubble    18.75% of the ideal time\n" in text
    assert "makespan  57; 48 without the bubble\n" in text
    assert "in flight 11 9 7 5: " in text


def test_json_holds_the_plan(tmp_path: Path) -> None:
    plan, text = ran(pp=2, micro_batches=2, out=str(tmp_path / "new/a.json"))
    assert text.endswith(f"written to {tmp_path}/new/a.json\n")
    saved = json.loads((tmp_path / "new/a.json").read_text())
    assert (saved["bubble"], saved["makespan"]) == (0.5, 9.0)
    assert saved["settings"]["micro_batches"] == 2
    assert saved["timeline"][1][1] == ["B0", 2.0, 4.0]
    instructions = saved["instructions"][1]
    assert instructions == [str(each) for each in plan.instructions[1]]
    assert "receive for F1 from 0" in instructions
    assert saved["peak_in_flight"] == [2, 1]


def test_write_that_fails_names_out(tmp_path: Path) -> None:
    (tmp_path / "folder").touch()  # after the check
    with pytest.raises(UserError, match=r"^out=.*folder/a\.json: "):
        ran(pp=2, out=str(tmp_path / "folder/a.json"))


def test_command_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, mlm.cli; code = mlm.cli.main(['plan', 'schedule', 'pp=2', 'out=a.json']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
