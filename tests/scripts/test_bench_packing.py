"""The benchmark of packing: a tiny run compares equal forms and ends with ratios."""

import json
from pathlib import Path

import bench_packing
import pytest


def test_tiny_run_writes_ratios_of_equal_forms(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    shape = ["--layers", "1", "--hidden", "64", "--length", "64", "--median", "12", "--batch", "12"]
    assert bench_packing.BENCH.main([*shape, "--pairs", "2", "--threads", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["ratio"].keys() == {"sorted", "padded"}
    assert result["tokens"]["packed"] <= result["tokens"]["padded"]


def test_forms_that_differ_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_packing, "TOLERANCE", -1.0)
    shape = ["--layers", "1", "--hidden", "64", "--length", "64", "--median", "12", "--batch", "4"]
    assert bench_packing.BENCH.main([*shape, "--pairs", "1", "--threads", "1"]) == 1
