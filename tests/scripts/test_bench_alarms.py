"""The benchmark of alarms judges runs and what is planted in them by both rules."""

import json
from collections.abc import Iterator
from pathlib import Path

import bench_alarms
import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_type_of_run_is_trained_once_and_judged_by_both_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_alarms, "RUNS", {"chat": bench_alarms.RUNS["chat"]})
    words = [
        "--steps",
        "70",
        "--synthetic",
        "300",
        "--series",
        str(tmp_path),
        "--out",
        str(tmp_path / "out.json"),
    ]
    assert bench_alarms.main(words) == 0
    assert np.load(tmp_path / "chat-0.npy").shape == (70, 2)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["runs"]["chat"]["now"]["steps"] == found["runs"]["chat"]["before"]["steps"] == 38
    assert found["synthetic"]["chat"]["now"]["gradient x 10,000"] == 1
    (tmp_path / "chat-0.npy").unlink()
    assert bench_alarms.main([*words, "--read-only"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["runs"] == {}


def test_heavy_tails_alarm_the_rule_before_alone() -> None:
    draw = np.random.default_rng(0)
    series = np.stack([draw.normal(4, 0.2, 5000), np.exp(draw.laplace(0, 0.3, 5000))], axis=1)
    found = bench_alarms.rates([series])
    assert found["before"]["alarms"] > 10
    assert found["now"]["alarms"] == 0
    assert found["now"]["NaN"] == 1
