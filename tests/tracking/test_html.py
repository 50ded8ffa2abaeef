"""The shell of pages: complete with curves and without, and safe with any text."""

import re
from pathlib import Path

import pytest

from mlm.tracking.html.curves import curves_of
from mlm.tracking.html.elements import Html, paragraph, table
from mlm.tracking.html.runs import read_runs
from mlm.tracking.html.shell import page
from tests.tracking.page.made import some_run

NAUGHTY = "</title></script><script>alert(1)</script>"


def test_sections_with_content_are_in_the_navigation() -> None:
    found = page("A", [("b-c", "B", paragraph("x")), ("none", "C", Html()), ("d", "D", paragraph("y"))])
    assert re.findall(r'<a href="#([^"]*)">([^<]*)</a>', found.decode().partition("<nav")[2]) == [
        *(("b-c", "B c"), ("d", "D"))
    ]
    assert re.findall(r'<section id="([^"]*)"><h2>([^<]*)</h2>', found.decode()) == [("b-c", "B"), ("d", "D")]


def test_texts_are_escaped() -> None:
    found = page(NAUGHTY, [("a", NAUGHTY, table([NAUGHTY], [[NAUGHTY, NAUGHTY]]))])
    assert b"<script" not in found
    assert found.count(b"&lt;script&gt;alert(1)") == 7  # the region's label is that of the heading


def test_curves_of_run_folders_bring_their_data_and_scripts(tmp_path: Path) -> None:
    folders = [str(some_run(tmp_path / name)) for name in ("a", "b")]
    curves, data = curves_of(read_runs(folders))
    found = page("Experiment", [("curves", "Curves", curves)], data=data).decode()
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["charts"][0] == {"key": "step:loss", "title": "Training loss", "unit": "nats per token"}
    assert all(needed in found for needed in ('id="charts"', 'id="controls"', 'id="data"', "uPlot (v"))


@pytest.mark.parametrize("data", [None, curves_of([])[1]], ids=["none", "empty"])
def test_pages_without_curves_have_no_charts(data: dict[str, object] | None) -> None:
    assert not curves_of([])[0]
    assert b'id="charts"' not in page("A", [("a", "B", paragraph("x"))], data=data)
