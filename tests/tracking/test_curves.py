"""The loss curve is a picture whatever the metrics hold."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from mlm.tracking import curves
from mlm.tracking.curves import draw_losses, frame, plot_losses, running_mean, series
from mlm.tracking.metrics import flatten_metrics
from tests.tracking.reporting import step_metrics


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
    assert draw(tmp_path, steps(count))[1] == 1200


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
    records = [
        {"step": 10, "loss": 3.0, "validation/wiki": 2.0, "validation/web": 4.0},
        {"step": 20, "loss": 3.0, "validation/wiki": 1.5},
    ]
    axes = Figure().subplots()
    draw_losses(axes, [], records, "nats per token")
    drawn = {str(line.get_label()): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn["wiki, last 1.500"] == [2.0, 1.5]
    assert drawn["web, last 4.000"][0] == 4.0


def test_series_takes_the_last_record_of_a_step_in_order() -> None:
    records = [{"step": 2, "loss": 9.0}, {"step": 1, "loss": 8.0}, {"step": 2, "loss": 7.0}]
    assert series(records, "loss") == ([1, 2], [8.0, 7.0])


def test_running_mean_is_centred_and_leaves_nan_out() -> None:
    nan = float("nan")
    assert running_mean([5.0, 4.0, 3.0, 2.0, 1.0], reach=1) == [5.0, 4.0, 3.0, 2.0, 1.0]  # a slope stays
    assert running_mean([0.0, 3.0, nan, 6.0, 0.0], reach=1) == [0.0, 1.5, 4.5, 3.0, 0.0]


def panels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, object]]
) -> dict[str, Axes]:
    """The panels of a picture by the label of their y axis."""
    made: list[Figure] = []

    def figure(*args: Any, **options: Any) -> Figure:
        made.append(Figure(*args, **options))
        return made[-1]

    monkeypatch.setattr(curves, "Figure", figure)
    monkeypatch.setattr(curves, "write_atomic", lambda path, write: None)  # a picture takes a second
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    return {axes.get_ylabel(): axes for axes in made[0].get_axes()}


def full_steps(count: int, **changed: object) -> list[dict[str, object]]:
    """Steps 1, 2, … as they are logged."""
    return [{"kind": "step", **flatten_metrics(step_metrics(i)), **changed} for i in range(1, count + 1)]


def test_panels_name_their_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = panels(tmp_path, monkeypatch, full_steps(3))
    assert list(found) == ["loss (nats per token)", "learning rate", "tokens/s", "gradient norm"]
    assert found["gradient norm"].get_xlabel() == "step"


def test_a_run_on_a_task_shows_examples_and_a_panel_of_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {"kind": "scores", "step": 3, "split": "dev", "accuracy": 0.9, "is_best": True}
    found = panels(tmp_path, monkeypatch, [*full_steps(3, examples_per_s=8.0), scores])
    assert "tokens/s" not in found
    assert list(found["examples/s"].get_lines()[0].get_ydata()) == [8.0] * 3
    assert list(found["score (of 1)"].get_lines()[0].get_ydata()) == [0.9]


def test_an_accuracy_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"validation/mlm_loss": 3.0, "validation/mlm_accuracy": 0.5}
    validation = {"kind": "validation", "step": 3, "loss": 4.0, **heads}
    found = panels(tmp_path, monkeypatch, [*full_steps(3), validation])
    assert [0.5] in [list(line.get_ydata()) for line in found["score (of 1)"].get_lines()]
    assert [0.5] not in [list(line.get_ydata()) for line in found["loss (nats per token)"].get_lines()]


@pytest.mark.parametrize("norms, scale", [((0.5, 1.0, 0.9), "linear"), ((50.0, 1.0, 0.9), "log")])
def test_gradient_norms_of_a_large_range_are_logarithmic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norms: tuple[float, ...], scale: str
) -> None:
    records = [{**r, "grad_norm": norm} for r, norm in zip(full_steps(3), norms, strict=True)]
    assert panels(tmp_path, monkeypatch, records)["gradient norm"].get_yscale() == scale


def test_first_steps_far_above_the_rest_do_not_flatten_a_curve() -> None:
    axes, losses = Figure().subplots(), [500.0, 90.0, *np.linspace(5, 3, 98).tolist()]
    frame(axes, losses)
    low, high = axes.get_ylim()
    assert 2 < low < 3
    assert 5 < high < 100


def test_a_short_or_even_curve_is_shown_whole() -> None:
    for losses in ([500.0, 5.0, 4.0], np.linspace(11, 3, 100).tolist(), [2.0] * 30):
        axes = Figure().subplots()
        frame(axes, losses)
        low, high = axes.get_ylim()
        assert low < min(losses) <= max(losses) < high


def test_curves_differ_without_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {f"validation/{name}": 3.0 for name in "abcd"}
    validations = [{"kind": "validation", "step": step, "loss": 4.0, **parts} for step in (1, 2, 3)]
    lines = panels(tmp_path, monkeypatch, [*full_steps(3), *validations])["loss (nats per token)"].get_lines()
    styles = {(line.get_marker(), str(line.get_linestyle())) for line in lines}
    assert len(styles) == len(lines) == 6
