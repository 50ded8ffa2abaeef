"""`mlm plan schedule` from the command line to its files."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console

from mlm.parallel.pipeline.actions import Plan, Send
from mlm.plan import picture
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.schedule import run, simulate
from mlm.util.errors import UserError


def ran(**settings: Any) -> tuple[Plan, str]:
    """The plan and what was printed."""
    file = io.StringIO()
    return run(PlanScheduleConfig(**settings), Console(file=file, width=120)), file.getvalue()


def test_picture_and_numbers_are_printed() -> None:
    _, text = ran(vp=2)
    assert text.startswith("interleaved 1F1B · pp=4 vp=2 micro_batches=8\n\ntime")
    assert "bubble    18.75% of the ideal time; formula (p-1)/(v*m) = 18.75%\n" in text
    assert "makespan  57; 48 without the bubble\n" in text
    assert re.search(r"3 │ +9 │ +5 │ +24 │ +24 │", text)


def test_nothing_is_written_without_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran()
    assert list(tmp_path.iterdir()) == []


def test_svg_holds_every_cell_and_number(tmp_path: Path) -> None:
    plan, text = ran(pp=2, vp=2, micro_batches=4, out=str(tmp_path / "new/a.svg"))
    svg = (tmp_path / "new/a.svg").read_text()
    labels = re.findall(r">(\d)</text>", svg)
    assert labels.count("3") >= 2 * 2 * 2  # ranks, chunks, ops; the axes have numbers too
    assert svg.count("<path") >= sum(map(len, plan.timeline))
    assert "backward, chunk 1" in svg
    assert "interleaved 1F1B · pp=2 vp=2 micro_batches=4   bubble 12.50%" in svg
    assert text.endswith(f"written to {tmp_path}/new/a.svg\n")


def test_equal_plans_give_equal_svgs(tmp_path: Path) -> None:
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        ran(pp=2, out=str(file))
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_page_has_every_computation_and_the_numbers_of_each_rank(tmp_path: Path) -> None:
    for batches in (2, 4):  # what mlm wrote is replaced
        plan, _ = ran(pp=2, micro_batches=batches, out=str(tmp_path / "a.html"))
    page = (tmp_path / "a.html").read_text()
    assert len(re.findall(r'<rect class="op[FB]"', page)) == sum(map(len, plan.timeline)) == 16
    assert "Bubble 25.00% of the ideal time; formula (p-1)/m = 25.00%" in page
    assert page.count('<th scope="row">P') == 2
    ran(micro_batches=2000, out=str(tmp_path / "b.html"))
    assert "16,000 computations are too many to draw" in (tmp_path / "b.html").read_text()


def test_png_is_a_picture_with_nothing_beside_it(tmp_path: Path) -> None:
    ran(pp=2, out=str(tmp_path / "a.png"))
    assert imread(tmp_path / "a.png").std() > 0.01  # not blank
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]


def test_long_schedule_stays_a_picture_a_viewer_opens(tmp_path: Path) -> None:
    ran(micro_batches=400, out=str(tmp_path / "a.png"))
    assert imread(tmp_path / "a.png").shape[1] == 150 * picture.LARGEST_INCHES


def test_json_holds_the_plan(tmp_path: Path) -> None:
    plan, _ = ran(pp=2, micro_batches=2, out=str(tmp_path / "a.json"))
    saved = json.loads((tmp_path / "a.json").read_text())
    assert (saved["bubble"], saved["makespan"]) == (0.5, 9.0)
    assert saved["bubble_formula"] == {"formula": "(p-1)/m", "value": 0.5, "exact": "without transfers"}
    assert saved["settings"]["micro_batches"] == 2
    assert [len(rank["instructions"]) for rank in saved["ranks"]] == [len(i) for i in plan.instructions]
    second = saved["ranks"][1]
    assert second["timeline"][1] == {"op": "B", "chunk": 0, "micro_batch": 0, "start": 2.0, "end": 4.0}
    assert {"do": "receive", "op": "F", "chunk": 0, "micro_batch": 1, "peer": 0} in second["instructions"]
    sends = [i for i in second["instructions"] if i["do"] == "send"]
    assert len(sends) == sum(isinstance(i, Send) for i in plan.instructions[1]) == second["sends"]


@pytest.mark.parametrize("name", ["a.svg", "a.json"])
def test_write_that_fails_names_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").touch()  # after the check
    with pytest.raises(UserError, match=r"^out=.*folder/a\.\w+: .*set another out="):
        ran(pp=2, out=str(tmp_path / "folder" / name))


def test_costs_reach_the_simulation() -> None:
    config = PlanScheduleConfig(pp=2, micro_batches=1, forward_cost=3, backward_cost=5, transfer_cost=7)
    assert simulate(config).makespan == 3 + 7 + 3 + 5 + 7 + 5
    split = PlanScheduleConfig(
        pp=1, micro_batches=1, pipeline="zb_h1", input_gradient_cost=5, weight_gradient_cost=7
    )
    assert simulate(split).makespan == 1 + 5 + 7


def test_command_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, mlm.config.cli; code = mlm.config.cli.main(['plan', 'schedule', 'pp=2', 'out=a.svg']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
