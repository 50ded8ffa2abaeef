"""Progress and tables where the stream is not a terminal."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlm
from mlm.tracking.reporter import training_console
from mlm.util.system import writable_streams
from mlm.util.terminal import ProgressLines, Screen, add_row, console, progress_bar, table


def test_a_log_gets_a_line_a_minute_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """100 of 1,000 are there already; 5 a second are done since."""
    ticks: Iterator[float] = iter([0.0, 1.0, 31.0, 61.0, 91.0, 121.0])
    lines = ProgressLines("scoring", 1000, clock=lambda: next(ticks))
    for count in (100, 150, 150, 150, 150):
        lines.advance(count)
    assert capsys.readouterr().err.splitlines() == [
        "scoring: 400 of 1,000, 0:02:00 left",
        "scoring: 700 of 1,000, 0:01:00 left",
    ]


@pytest.mark.parametrize("piece", ["count", "table", "error table", "training"])
def test_no_escape_code_is_written_to_a_pipe_even_in_a_notebook(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    """A notebook's kernel sets FORCE_COLOR for the commands it starts; rich takes that for a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-color")
    if piece == "count":
        with progress_bar("scoring", 2) as advance:
            advance(1)
    else:
        made = table("a title", "name", "number#")
        add_row(made, "a", 1)
        screens = {
            "table": console,
            "error table": lambda: Screen(stderr=True),
            "training": lambda: training_console(Path("metrics.jsonl")),
        }
        screens[piece]().print(made)
    written = capsys.readouterr()
    assert "\x1b" not in written.out + written.err


def test_every_console_is_one_that_keeps_escape_codes_from_pipes() -> None:
    files = list(Path(mlm.__file__).parent.rglob("*.py"))
    assert len(files) > 300
    assert [path for path in files if re.search(r"(?<![\w.])Console\(", path.read_text())] == []


def test_progress_in_a_log_is_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlm.util.terminal.LINE_S", 0.0)
    for shown in (True, False):
        with progress_bar("scoring", 2, shown=shown) as advance:
            advance(1)
    assert capsys.readouterr().err == "scoring: 1 of 2\n"


def test_text_that_an_encoding_lacks_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with writable_streams():
        print("80 × 2 …")
    assert raw.getvalue() == b"80 \\xd7 2 \\u2026\n"


def test_closed_standard_streams_take_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with writable_streams():
        assert not sys.stdout.isatty()
        print("nobody reads this", file=sys.stderr)
    assert sys.stdout is None


@pytest.mark.parametrize(
    "line, code, said",
    [
        ('"$0" -m mlm help pretrain | true; exit "${PIPESTATUS[0]}"', 0, ""),
        (
            '"$0" -m mlm help pretrain > /dev/full',
            1,
            "mlm: standard output: No space left on device; what follows is not shown\n",
        ),
    ],
)
def test_command_survives_its_standard_output(line: str, code: int, said: str) -> None:
    env = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
    found = subprocess.run(
        ["bash", "-c", line, sys.executable], capture_output=True, text=True, env=env, timeout=120
    )
    assert (found.returncode, found.stderr) == (code, said)
