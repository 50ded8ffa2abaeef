"""Progress where stderr is no terminal."""

from collections.abc import Iterator

import pytest

from mlm.terminal import CountLines, count_progress


def test_a_log_gets_a_line_a_minute_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """100 of 1,000 are there already; 5 a second are done since."""
    ticks: Iterator[float] = iter([0.0, 1.0, 31.0, 61.0, 91.0, 121.0])
    lines = CountLines("scoring", 1000, clock=lambda: next(ticks))
    for count in (100, 150, 150, 150, 150):
        lines.advance(count)
    assert capsys.readouterr().err.splitlines() == [
        "scoring: 400 of 1,000, 0:02:00 left",
        "scoring: 700 of 1,000, 0:01:00 left",
    ]


def test_progress_in_a_log_is_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlm.terminal.LINE_S", 0.0)
    for shown in (True, False):
        with count_progress("scoring", 2, shown=shown) as advance:
            advance(1)
    assert capsys.readouterr().err == "scoring: 1 of 2\n"
