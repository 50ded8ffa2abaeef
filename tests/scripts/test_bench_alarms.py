"""The benchmark of alarms judges runs and what is planted in them."""

import json
from pathlib import Path

import bench_alarms
import numpy as np
import pytest


def test_a_type_of_run_is_trained_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_alarms, "RUNS", {"chat": bench_alarms.RUNS["chat"]})
    out = tmp_path / "out.json"
    assert bench_alarms.BENCH.main(["--steps", "70", "--out", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert runs["chat"]["steps"] == 38
    assert runs["all"] == runs["chat"]


def test_heavy_tails_raise_no_alarm_and_planted_faults_do() -> None:
    draw = np.random.default_rng(0)
    series = np.stack([draw.normal(4, 0.2, 5000), np.exp(draw.laplace(0, 0.3, 5000))], axis=1)
    rates = bench_alarms.rates(bench_alarms.judged(series))
    assert rates["alarms"] == 0
    assert rates["gradient x 10,000"] == 1
