"""`mlm plan schedule`: a plan drawn in characters, its numbers and its files."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from rich.console import Console

from mlm.parallel.pipeline.actions import Plan
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.schedule import HUES, draw, label, run
from mlm.util.errors import UserError


def ran(**settings: Any) -> tuple[Plan, str]:
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


def plan(name: str = "1f1b", p: int = 4, v: int = 1, m: int = 8) -> Plan:
    return lower(build_schedule(name, stages=p, chunks=v, micro_batches=m))


def drawn(plan: Plan, width: int = 100, **options: object) -> str:
    """The picture as it is printed to a file."""
    file = io.StringIO()
    draw(plan, Console(file=file, width=width, **{"force_terminal": False, **options}))
    return file.getvalue()


def lines(text: str, rank: int) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"rank {rank}")]


def test_one_forward_one_backward_is_figure_4_of_the_paper() -> None:
    """arXiv:2104.04473, figure 4, top: rank 0 warms up with p forwards, the last rank with one."""
    expected = """
rank 0  F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--
rank 1  ..F0F1F2........B0--F3B1--F4B2--F5B3--F6B4--F7B5--..B6--..B7--....
rank 2  ....F0F1....B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--..B7--........
rank 3  ......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--............
"""
    assert expected.strip() in drawn(plan())


def test_weight_gradients_have_their_letter_and_legend() -> None:
    text = drawn(plan("zb_h1", p=2, m=2))
    assert lines(text, 1) == ["rank 1  ..F0B0F1B1W0W1"]
    assert "B input gradient   W weight gradient" in text


def test_folded_windows_join_to_the_whole_line() -> None:
    width = 47
    (whole,) = lines(drawn(plan(p=2), width=500), 1)
    folded = lines(drawn(plan(p=2), width=width), 1)
    assert "".join(line[8:] for line in folded) == whole[8:]
    assert all(len(line) <= width for line in folded)


def test_svg_has_the_label_of_every_computation(tmp_path: Path) -> None:
    """And is replaced by the same command; another program's picture is not."""
    out = tmp_path / "a.svg"
    plan, _ = ran(pp=4, vp=3, micro_batches=8, out=str(out))
    labels = re.findall(r">([FBW]\d+\.\d)</text>", out.read_text())
    expected = [label(span.action, 3) for spans in plan.timeline for span in spans]
    assert len(expected) == 4 * 3 * 8 * 2
    assert sorted(labels) == sorted(expected)
    ran(pp=2, micro_batches=2, out=str(out))
    out.write_text('<?xml version="1.0"?><svg/>')
    with pytest.raises(UserError, match="was not written by mlm"):
        ran(pp=2, micro_batches=2, out=str(out))


def test_png_has_the_colours_of_the_ops_where_the_plan_has_them(tmp_path: Path) -> None:
    out = tmp_path / "a.png"
    plan, _ = ran(pp=4, micro_batches=8, pipeline="zb_h1", out=str(out))
    pixels = matplotlib.image.imread(out)[..., :3]
    busy = sum(span.end - span.start for spans in plan.timeline for span in spans)
    shares = []
    for op, hue in HUES.items():
        colour = [int(part) / 255 for part in hue[4:-1].split(",")]
        time = sum(s.end - s.start for spans in plan.timeline for s in spans if s.action.op is op)
        count = (abs(pixels - colour) < 0.01).all(-1).sum()
        shares.append((count, time / busy))
    total = sum(count for count, _ in shares)
    for count, share in shares:
        assert count / total == pytest.approx(share, abs=0.03)
    ran(pp=2, micro_batches=2, out=str(out))
