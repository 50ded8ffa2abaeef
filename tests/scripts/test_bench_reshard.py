"""The reshard benchmark: a tiny run ends with numbers, and its limit is a limit."""

import json
from pathlib import Path

import bench_reshard
import pytest


def test_layers_make_the_size_asked_for() -> None:
    tensors, config = bench_reshard.checkpoint_of(8.0, 1920)
    assert sum(tensor.num_bytes for tensor in tensors.values()) == pytest.approx(8e9, rel=0.05)
    assert config.model.num_layers == 13


@pytest.mark.slow
def test_a_tiny_run_measures_peak_memory_and_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--gb", "0.001", "--hidden-size", "20", "--folder", str(tmp_path)]
    assert bench_reshard.BENCH.main([*words, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["peak_bytes"] >= result["imports_bytes"] > 10e6
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_memory_above_the_limit_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"peak_bytes": 2e9, "imports_bytes": 1e9, "seconds": 1.0}
    monkeypatch.setattr(bench_reshard, "child", lambda args, folder: told)
    words = ["--gb", "0.001", "--hidden-size", "20", "--folder", str(tmp_path)]
    assert bench_reshard.BENCH.main([*words, "--limit-gb", "1.5"]) == 1
    assert bench_reshard.BENCH.main([*words, "--limit-gb", "2.5"]) == 0
