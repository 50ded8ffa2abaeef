"""The layout benchmark: what its words mean, and that a tiny run ends with numbers."""

import json
from pathlib import Path

import bench_train
import pytest


@pytest.mark.slow
def test_a_tiny_run_writes_ratios(tmp_path: Path) -> None:
    out, layouts = tmp_path / "out.json", ["cp=1", "cp=2"]
    words = "--device cpu --shape custom 2,32,2,16,64,4 --pairs 1 --attempts 1 --seconds 0 --contenders"
    code = bench_train.BENCH.main([*words.split(), *layouts, "--out", str(out)])
    (result,) = json.loads(out.read_text())["shapes"]
    (series,) = result["series"]
    assert [series["reference"], series["other"]] == layouts
    assert series["rounds"] == 1
    assert all(result["contenders"][name]["memory"]["peak_above_bytes"] > 0 for name in layouts)
    assert code == 1  # one pair is a trial
