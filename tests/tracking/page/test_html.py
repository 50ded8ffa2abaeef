"""The shell of pages: complete with curves and without, and safe with any text."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from markupsafe import Markup

from mlm.tracking.page import html
from mlm.tracking.page.html import page, paragraph, thin


def test_sections_with_content_are_in_the_navigation() -> None:
    found = page("A", [("b-c", "B", paragraph("x")), ("none", "C", Markup()), ("d", "D", paragraph("y"))])
    assert re.findall(r'<a href="#([^"]*)">([^<]*)</a>', found.decode().partition("<nav")[2]) == [
        *(("b-c", "B c"), ("d", "D"))
    ]
    assert re.findall(r'<section id="([^"]*)"><h2>([^<]*)</h2>', found.decode()) == [("b-c", "B"), ("d", "D")]


def axes(count: int) -> dict[str, np.ndarray]:
    return {"step": np.arange(float(count))}


def test_thinning_keeps_the_extremes_and_both_ends() -> None:
    y = np.random.default_rng(0).normal(size=100_000).round(3)
    y[54_321], y[12_345] = 99.0, -99.0
    curve = thin(axes(len(y)), y, 500)
    assert len(curve["y"]) <= 500
    assert {99.0, -99.0, y[0], y[-1]} <= set(curve["y"])
    for start in range(0, len(y), 1000):  # of every bucket, whatever its place
        part = y[start : start + 1000]
        assert {part[0], part[-1], part.min(), part.max()} <= set(curve["y"])


def test_a_gap_survives_thinning() -> None:
    y = np.ones(10_000)
    y[5_005] = math.nan
    curve = thin(axes(len(y)), y, 100)
    assert 5_005 in curve["step"]
    assert curve["y"].count(None) == 1


def test_means_are_those_of_all_steps_of_a_bucket() -> None:
    y = np.concatenate([np.zeros(999), [1000.0], np.full(1000, 3.0)])
    curve = thin(axes(len(y)), y, 10)
    assert curve["mean"]["y"] == [1.0, 3.0]
    assert curve["bucket"] == 1000


NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
@pytest.mark.parametrize(
    ("value", "label"),
    [(-1.23456e30, "-1.235e+30"), (2.5e12, "2.5T"), (99999, "99999"), (1e-30, "1e-30"), (0, "0")],
)
def test_a_number_beside_an_axis_is_short(value: float, label: str) -> None:
    text = (Path(html.__file__).parent / "assets/curves.js").read_text()
    patterns = (
        r"^  const UNITS = .*?;$",
        *(rf"^  const {name} = .*?^  }};$" for name in ("short", "amount")),
    )
    source = "".join("".join(re.findall(pattern, text, re.M | re.S)) for pattern in patterns)
    asked = f"{source} process.stdout.write(amount({json.dumps(value)}))"
    done = subprocess.run([str(NODE), "-e", asked], capture_output=True, text=True, check=True)
    assert done.stdout == label
    assert len(label) <= 10
