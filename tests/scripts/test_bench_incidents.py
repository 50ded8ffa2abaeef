"""The benchmark of incidents times steps with and without being watched."""

import json
from pathlib import Path

import bench_incidents
import pytest

TINY = ["--layers", "1", "--hidden", "64", "--vocab", "64", "--seq", "8", "--batch", "2", "--rounds", "2"]


def test_it_times_both_in_turn_and_records_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_incidents, "TARGET", 1e9)  # times of so little work say nothing
    assert bench_incidents.BENCH.main([*TINY, "--out", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert {name: len(times) for name, times in found["seconds_per_step"].items()} == {
        "without": 2,
        "with": 2,
    }
    assert found["share"] > found["comparisons"] > 0
    assert found["hooks_s"] > 0


def test_a_share_above_the_target_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_incidents, "TARGET", -1e9)
    assert bench_incidents.BENCH.main(TINY) == 1


def test_a_mistake_is_reported_by_the_exit_code() -> None:
    assert bench_incidents.BENCH.main(["--rounds", "0"]) == 2
