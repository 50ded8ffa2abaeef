"""The generation benchmark: both continue the same prompts alike, and the record says so."""

import json
from pathlib import Path

import bench_generate
import pytest

TINY = [
    *("--layers", "1", "--hidden", "64", "--vocab", "97", "--positions", "16", "--prompt", "3", "--new", "4"),
    *("--rounds", "1", "--threads", "1", "--batches", "2"),
]


def test_it_compares_the_same_tokens_and_records_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_generate, "TARGET", 0.0)  # times of so little work say nothing
    assert bench_generate.BENCH.main([*TINY, "--out", str(tmp_path / "out.json")]) == 0
    (one,) = json.loads((tmp_path / "out.json").read_text())["series"]
    assert one["agree"]
    assert {name: len(times) for name, times in one["seconds_per_step"].items()} == {
        "mlm": 1,
        "transformers": 1,
    }


def test_a_ratio_below_the_target_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_generate, "TARGET", 1e9)
    assert bench_generate.BENCH.main(TINY) == 1


@pytest.mark.parametrize("words", [["--new", "0"], ["--new", "20"]])
def test_a_mistake_is_reported_by_the_exit_code(words: list[str]) -> None:
    assert bench_generate.BENCH.main([*TINY, *words]) == 2
