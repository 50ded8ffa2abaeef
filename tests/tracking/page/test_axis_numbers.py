"""Numbers beside an axis and in a legend: the page's own script, run by Node.js where it is installed."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlm.tracking.page import html
from tests.slow import thinned

SCRIPT = Path(html.__file__).parent / "assets/curves.js"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
@pytest.mark.parametrize(
    ("value", "label"),
    thinned(
        [
            (1e30, "1e+30"),
            (-1.23456e30, "-1.235e+30"),
            (3.4e38, "3.4e+38"),
            (1e15, "1e+15"),
            (2.5e12, "2.5T"),
            (123456, "123.5k"),
            (99999, "99999"),
            (1e-5, "0.00001"),
            (1e-30, "1e-30"),
            (0, "0"),
        ],
        2,
    ),
)
def test_a_number_beside_an_axis_is_short(value: float, label: str) -> None:
    """At most 10 characters, which its margin holds."""
    text = SCRIPT.read_text()
    patterns = (
        r"^  const UNITS = .*?;$",
        *(rf"^  const {name} = .*?^  }};$" for name in ("short", "amount")),
    )
    source = "".join("".join(re.findall(pattern, text, re.M | re.S)) for pattern in patterns)
    asked = f"{source} process.stdout.write(amount({json.dumps(value)}))"
    done = subprocess.run([str(NODE), "-e", asked], capture_output=True, text=True, check=True)
    assert done.stdout == label
    assert len(label) <= 10
