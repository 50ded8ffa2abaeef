"""`mlm plan schedule` from the command line to its files."""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mlm.parallel.pipeline.actions import Plan
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.schedule import closed_bubble, rank_numbers, run, simulate
from mlm.util.errors import UserError


def ran(**settings: Any) -> tuple[Plan, str]:
    """The plan and what was printed."""
    with redirect_stdout(io.StringIO()) as printed:
        plan = run(PlanScheduleConfig(**settings))
    return plan, printed.getvalue()


def test_picture_and_numbers_are_printed() -> None:
    _, text = ran(vp=2)
    assert text.startswith("interleaved 1F1B · pp=4 vp=2 micro_batches=8\n\nrank 0  F0")
    assert "bubble    18.75% of the ideal time; formula (p-1)/(v*m) = 18.75%\n" in text
    assert "makespan  57; 48 without the bubble\n" in text
    assert re.search(r"3 +9 +5 +24 +24", text)


@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 1},
        {"pp": 4},
        {"pp": 4, "micro_batches": 2},
        {"pp": 3, "vp": 2, "micro_batches": 6},
        {"pp": 4, "vp": 4, "backward_cost": 1.5},
        {"pipeline": "gpipe", "forward_cost": 3.0},
        {"pipeline": "gpipe", "vp": 2},
        {"pipeline": "zb_h1"},
        {"pipeline": "zb_h1", "micro_batches": 3},
        {"pipeline": "zb_h1", "forward_cost": 0.5, "weight_gradient_cost": 0.75},
        {"pipeline": "zb_h1", "forward_cost": 3.0, "weight_gradient_cost": 2.0},
        {"pipeline": "zb_h1", "forward_cost": 2.0, "weight_gradient_cost": 2.0, "micro_batches": 3},
    ],
)
def test_formula_equals_the_simulation(settings: dict[str, Any]) -> None:
    assert simulate(PlanScheduleConfig(**settings)).bubble == pytest.approx(
        closed_bubble(PlanScheduleConfig(**settings)).value
    )


def test_zero_bubble_has_the_papers_formula_where_it_holds() -> None:
    """arXiv:2401.10241, table 2."""
    assert closed_bubble(PlanScheduleConfig(pipeline="zb_h1")).words == "(p-1)(F+B-W) / (m(F+B+W))"
    assert "min(p,m)" in closed_bubble(PlanScheduleConfig(pipeline="zb_h1", micro_batches=3)).words


def test_formula_that_does_not_hold_says_when_it_would() -> None:
    slow = PlanScheduleConfig(vp=2, transfer_cost=0.5)
    words = closed_bubble(slow).compared(simulate(slow).bubble)
    assert words == "formula (p-1)/(v*m) = 18.75% (exact without transfers and for F <= B <= 2F)"


def test_ranks_hold_what_1f1b_promises() -> None:
    """In flight p - r (arXiv:2104.04473, section 2.2.1); the ends of the pipeline have one neighbour."""
    numbers = rank_numbers(simulate(PlanScheduleConfig()))
    assert [n.rank for n in numbers] == [0, 1, 2, 3]
    assert [n.peak_in_flight for n in numbers] == [4, 3, 2, 1]
    assert [n.sends for n in numbers] == [n.receives for n in numbers] == [8, 16, 16, 8]
    assert [n.idle for n in numbers] == [9.0] * 4


def test_svg_holds_every_cell_and_number(tmp_path: Path) -> None:
    plan, text = ran(pp=2, vp=2, micro_batches=4, out=str(tmp_path / "new/a.svg"))
    svg = (tmp_path / "new/a.svg").read_text()
    ElementTree.fromstring(svg)
    labels = re.findall(r">[FB]?(\d)</text>", svg)
    assert labels.count("3") == 2 * 2 * 2  # ranks, chunks, ops
    assert len(re.findall(r'<rect class="op[FB]"', svg)) == sum(map(len, plan.timeline))
    assert "B backward" in svg
    assert "interleaved 1F1B · pp=2 vp=2 micro_batches=4   bubble 12.50%" in svg
    assert text.endswith(f"written to {tmp_path}/new/a.svg\n")


def test_equal_plans_give_equal_svgs(tmp_path: Path) -> None:
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        ran(pp=2, out=str(file))
    assert files[0].read_bytes() == files[1].read_bytes()


def test_json_holds_the_plan(tmp_path: Path) -> None:
    plan, _ = ran(pp=2, micro_batches=2, out=str(tmp_path / "a.json"))
    saved = json.loads((tmp_path / "a.json").read_text())
    assert (saved["bubble"], saved["makespan"]) == (0.5, 9.0)
    assert saved["bubble_formula"] == {"words": "(p-1)/m", "value": 0.5, "holds": "without transfers"}
    assert saved["settings"]["micro_batches"] == 2
    assert saved["timeline"][1][1] == ["B0", 2.0, 4.0]
    instructions = saved["instructions"][1]
    assert instructions == [str(each) for each in plan.instructions[1]]
    assert "receive for F1 from 0" in instructions
    sends = [each for each in instructions if each.startswith("send of ")]
    assert len(sends) == saved["ranks"][1]["sends"] == 2


def test_write_that_fails_names_out(tmp_path: Path) -> None:
    (tmp_path / "folder").touch()  # after the check
    with pytest.raises(UserError, match=r"^out=.*folder/a\.svg: "):
        ran(pp=2, out=str(tmp_path / "folder/a.svg"))


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
