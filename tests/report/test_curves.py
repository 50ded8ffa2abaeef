"""The loss curve is a picture whatever the metrics hold."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from mlm.report.curves import draw_parts, plot_losses, running_mean, series


def draw(tmp_path: Path, records: list[dict[str, object]], tail: bytes = b"") -> tuple[int, ...]:
    """Shape of the picture of `records`, read back; its file is that of a picture with something in it."""
    metrics, png = tmp_path / "metrics.jsonl", tmp_path / "losses.png"
    metrics.write_bytes(b"".join(json.dumps(r).encode() + b"\n" for r in records) + tail)
    plot_losses(metrics, png)
    assert png.stat().st_size > 10_000
    picture = imread(png)
    assert picture.std() > 0.01  # not blank
    return picture.shape


def steps(count: int) -> list[dict[str, object]]:
    """Logged steps 10, 20, …"""
    return [{"kind": "step", "step": 10 * i, "loss": 8 / i, "lr": 1e-4} for i in range(1, count + 1)]


@pytest.mark.parametrize("count", [0, 1, 2, 59, 200])
def test_any_number_of_points_makes_a_picture(tmp_path: Path, count: int) -> None:
    assert draw(tmp_path, steps(count))[:2] == (750, 1200)


def test_lines_and_losses_it_cannot_read_are_skipped(tmp_path: Path) -> None:
    odd = [
        {"kind": "step", "step": 30, "loss": None, "lr": 1e-4},
        {"kind": "validation", "step": 30, "loss": None},
        {"kind": "validation", "step": 40, "loss": 3.5},
        {"kind": "run", "start_step": 0},
    ]
    assert draw(tmp_path, [*steps(5), *odd], tail=b'{"kind": "step", "st')


def test_the_corpora_of_a_blend_have_a_curve_each() -> None:
    """Of those that came or went on the way, too."""
    records: list[dict[str, object]] = [
        {"step": 10, "loss": 3.0, "validation/wiki": 2.0, "validation/web": 4.0},
        {"step": 20, "loss": 3.0, "validation/wiki": 1.5},
    ]
    axes = Figure().subplots()
    draw_parts(axes, records)
    drawn = {str(line.get_label()): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn["wiki, last 1.500"] == [2.0, 1.5]
    assert drawn["web, last 4.000"][0] == 4.0


def test_a_single_corpus_has_no_curves_of_parts() -> None:
    axes = Figure().subplots()
    draw_parts(axes, [{"step": 10, "loss": 3.0}])
    assert len(axes.get_lines()) == 0
    assert axes.get_legend() is None


def test_nothing_is_left_beside_the_picture(tmp_path: Path) -> None:
    draw(tmp_path, steps(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["losses.png", "metrics.jsonl"]


def test_series_takes_the_last_record_of_a_step_in_order() -> None:
    records = [{"step": 2, "loss": 9.0}, {"step": 1, "loss": 8.0}, {"step": 2, "loss": 7.0}]
    assert series(records, "loss") == ([1, 2], [8.0, 7.0])


def test_running_mean_is_centred_and_leaves_nan_out() -> None:
    nan = float("nan")
    assert running_mean([5.0, 4.0, 3.0, 2.0, 1.0], reach=1) == [5.0, 4.0, 3.0, 2.0, 1.0]  # a slope stays
    assert running_mean([0.0, 3.0, nan, 6.0, 0.0], reach=1) == [0.0, 1.5, 4.5, 3.0, 0.0]
