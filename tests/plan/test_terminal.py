"""A plan drawn in characters."""

import io
import re

import pytest
from rich.console import Console

from mlm.parallel.pipeline.actions import Plan
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.plan.schedule import draw, row


def plan(name: str = "1f1b", p: int = 4, v: int = 1, m: int = 8) -> Plan:
    return lower(build_schedule(name, stages=p, chunks=v, micro_batches=m))


def drawn(plan: Plan, width: int = 100, **options: object) -> str:
    """The picture as it is printed to a file."""
    file = io.StringIO()
    draw(plan, Console(file=file, width=width, **{"force_terminal": False, **options}))
    return file.getvalue()


def lines(text: str, rank: int) -> list[str]:
    """A rank's lines, one for each window."""
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


def test_second_chunk_has_small_letters() -> None:
    assert lines(drawn(plan(p=2, v=2, m=2)), 1) == ["rank 1  ..F0F1f0b0--f1b1--B0--B1--...."]


def test_more_chunks_are_numbered() -> None:
    assert "F1.0F2.0F0.1F1.1F2.1F0.2" in drawn(plan(p=3, v=3, m=3))


def test_weight_gradients_have_their_letter_and_legend() -> None:
    text = drawn(plan("zb_h1", p=2, m=2))
    assert lines(text, 1) == ["rank 1  ..F0B0F1B1W0W1"]
    assert "B input gradient   W weight gradient" in text


@pytest.mark.parametrize("width", [30, 47, 80])
def test_folded_windows_join_to_the_whole_line(width: int) -> None:
    (whole,) = lines(drawn(plan(p=2), width=500), 1)
    folded = lines(drawn(plan(p=2), width=width), 1)
    assert "".join(line[8:] for line in folded) == whole[8:]
    assert all(len(line) <= width for line in folded)


def test_long_schedule_shows_its_start() -> None:
    text = drawn(plan(m=400))
    assert lines(text, 0)[0].startswith("rank 0  F0--F1--F2--F3--....")
    assert len(text.splitlines()) < 80
    (left_out,) = re.findall(r"… the rest, from (\S+) on, is left out; out=schedule.json holds all …", text)
    shown = sum(len(line) - 8 for line in lines(text, 0))
    assert float(left_out) == shown / 4 < 1209


def test_colours_tell_ops_apart() -> None:
    """Where the terminal has them; the letters are the same."""
    spans = plan("zb_h1", p=2, m=2).timeline[0]
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system="truecolor")
    whole = row(spans, 1, 2, 100)
    colours = {s.text[0]: s.style.bgcolor.name for s in console.render(whole) if s.style and s.style.bgcolor}
    assert set(colours) == set("FBW")
    assert len(set(colours.values())) == 3
    assert "F0F1" in drawn(plan(), force_terminal=True, color_system="truecolor", no_color=True)
