"""v1-scaling, v1-heads, v1-strong-scaling: their conclusions from made-up step times with a known answer."""

from pathlib import Path
from typing import Any

import pytest

from mlm.reproduce.conclusion import Conclusion, Verdict
from mlm.reproduce.experiment import Experiment
from mlm.reproduce.measured import run_name
from mlm.reproduce.results import Results
from mlm.reproduce.v1 import heads, plan_2019, scaling, strong_scaling
from mlm.reproduce.v1.ranks import sent_megabytes, waiting_share
from tests.reproduce.made_runs import made_results, write_result, write_run

BASE = 0.04  # TFLOP/s of one process
NOISE = (0.99, 1.0, 1.01)  # of the rounds


def prepared(experiment: Experiment, folder: Path, **settings: Any) -> Results:
    """Return results whose plans are all the same; runs are a test's own."""
    results = made_results(experiment, folder, cores=2, **settings)
    for step in results.steps.values():
        if step.words[1] == "plan":
            write_result(folder / step.result, {"layouts": [{"model_tflops": 50.0, "step_s": 1.0}]})
    return results


def write_rounds(
    results: Results, experiment: str, contender: str, efficiency: float, ranks: int = 1
) -> None:
    """Write a contender's rounds: `efficiency` times BASE for a rank, a quarter of its time waiting."""
    times = [{"computing": 0.75, "waiting over tp": 0.25, "host": "h"}] * ranks
    for number in results.seeds:
        write_run(
            results.folder / f"runs/{run_name(experiment, contender, number)}",
            seconds=0.1 / efficiency / ranks,
            ranks=[times] * 3 if ranks > 1 else (),
            tflops=BASE * efficiency * NOISE[number - 1],
        )


def weak(folder: Path, efficiencies: dict[str, float], seeds: int = 3) -> Conclusion:
    results = prepared(scaling.EXPERIMENT, folder, seeds=seeds)
    for each in scaling.CONTENDERS["laptop"]:
        write_rounds(results, scaling.NAME, each.name, efficiencies.get(each.name, 1.0), each.ranks)
    return scaling.conclude(results)


@pytest.mark.parametrize(
    ("alone", "replicated", "seeds", "verdict"),
    [
        (0.96, 0.97, 3, Verdict.AGREES),
        (0.80, 0.97, 3, Verdict.PARTLY),
        (0.45, 0.97, 3, Verdict.CONTRADICTS),
        (0.96, 0.97, 2, Verdict.OPEN),
    ],
    ids=["as published", "less", "no more work than one process", "two rounds"],
)
def test_weak_scaling_is_judged_where_each_rank_has_a_core(
    alone: float, replicated: float, seeds: int, verdict: Verdict, tmp_path: Path
) -> None:
    taking_turns = {"tp4-dp1": 0.3, "tp2-dp2": 0.3}
    found = weak(tmp_path, {"tp2-dp1": alone, "tp1-dp2": replicated, **taking_turns}, seeds)
    assert found.verdict is verdict


def test_weak_scaling_counts_cores_and_waiting(tmp_path: Path) -> None:
    """Four ranks on two cores at 0.4 each do 80 % of what those can; without waiting 0.4 is 0.53."""
    found = weak(tmp_path, {"tp2-dp1": 0.9, "tp1-dp2": 0.9, "tp4-dp1": 0.4, "tp2-dp2": 0.4})
    row = next(row for row in found.tables[0].rows if row[0] == "tp=4 dp=1")
    assert row[1:3] == [4, 2]
    assert row[4] == "40.0 % (40.0 to 40.0)"
    assert row[5] == "80.0 % (80.0 to 80.0)"
    assert row[6] == "25.0 % (25.0 to 25.0)"
    assert row[7] == "53.3 % (53.3 to 53.3)"
    assert (
        "tp=4 dp=1 40.0 % (40.0 to 40.0), which is 80.0 % (80.0 to 80.0) of what 2 cores can do" in found.seen
    )


def test_weak_scaling_plans_all_rows_of_the_paper(tmp_path: Path) -> None:
    results = prepared(scaling.EXPERIMENT, tmp_path, scale="paper")
    found = scaling.conclude(results)
    assert found.verdict is Verdict.PLANNED
    last = found.tables[0].rows[-1]
    assert last[:3] == ["8.3B, 512 GPUs", "tp=8 dp=64", "74 %"]
    assert abs(float(str(last[3]).removesuffix(" %")) - 74) < 5
    assert len(found.commands) == 8


@pytest.mark.parametrize(
    ("efficiencies", "verdict"),
    [
        ((0.9, 0.8, 0.7), Verdict.AGREES),
        ((0.9, 0.9, 0.7), Verdict.PARTLY),
        ((0.7, 0.8, 0.9), Verdict.CONTRADICTS),
        ((0.9, 0.9, 0.9), Verdict.OPEN),
    ],
    ids=["falls", "falls late", "rises", "same"],
)
def test_heads_lower_efficiency_only_if_all_rounds_show_it(
    efficiencies: tuple[float, ...], verdict: Verdict, tmp_path: Path
) -> None:
    results = prepared(heads.EXPERIMENT, tmp_path)
    for n, efficiency in zip(heads.HEADS["laptop"], efficiencies, strict=True):
        write_rounds(results, heads.NAME, heads.contender(n, 1), 1.0)
        write_rounds(results, heads.NAME, heads.contender(n, 2), efficiency, ranks=2)
    found = heads.conclude(results)
    assert found.verdict is verdict
    share = f"{100 * efficiencies[0]:.1f}"
    assert found.tables[0].rows[0][1] == f"{share} % ({share} to {share})"


def test_heads_of_the_paper_are_planned_within_two_points() -> None:
    """The plan is fitted on the paper's other table."""
    found = heads.efficiencies_2019()
    assert all(abs(found[n] - published) < 2 for n, published in heads.PUBLISHED.items())


@pytest.mark.parametrize(
    ("speedup", "seeds", "verdict"),
    [
        (1.7, 3, Verdict.AGREES),
        (1.3, 3, Verdict.PARTLY),
        (0.9, 3, Verdict.CONTRADICTS),
        (2.2, 3, Verdict.CONTRADICTS),
        (1.7, 2, Verdict.OPEN),
    ],
    ids=["as published", "less", "slower", "more than the ranks", "two rounds"],
)
def test_strong_scaling_is_judged_where_each_rank_has_a_core(
    speedup: float, seeds: int, verdict: Verdict, tmp_path: Path
) -> None:
    results = prepared(strong_scaling.EXPERIMENT, tmp_path, seeds=seeds)
    for tp, times in ((1, 1.0), (2, speedup), (4, 1.5)):
        write_rounds(results, strong_scaling.NAME, strong_scaling.contender(tp), times / tp, ranks=tp)
    found = strong_scaling.conclude(results)
    assert found.verdict is verdict
    assert "1.5 (1.5 to 1.5) with 4 ranks on 2 cores (published 2.34)" in found.seen


def test_strong_scaling_of_the_paper_is_planned_between_one_and_the_gpus() -> None:
    found = strong_scaling.speedups_2019()
    assert found[1] == 1
    assert all(1 < found[tp] < tp for tp in (2, 4, 8))


def test_waiting_is_a_share_of_all_ranks_after_the_first_record() -> None:
    warm_up = {"ranks": [{"computing": 0.0, "waiting over tp": 9.0}]}
    times = {"ranks": [{"computing": 3.0, "waiting over tp": 1.0, "host": "h"}, {"computing": 4.0}]}
    assert waiting_share([warm_up, times]) == pytest.approx(1 / 8)
    assert waiting_share([]) == 0


def test_what_tensor_parallelism_sends_is_that_of_the_papers_all_reduces() -> None:
    """A layer has four all-reduces of [rows, hidden] float32: with two ranks each sends the tensor once."""
    assert sent_megabytes(layers=1, hidden=1000, rows=1000, tp=2) == pytest.approx(6 * 4)
    assert sent_megabytes(layers=1, hidden=1000, rows=1000, tp=1) == 0


def test_the_program_of_2019_reaches_its_throughput_on_one_gpu() -> None:
    """39 TFLOP/s of the 1.2B model (arXiv:1909.08053, section 5.1)."""
    found = plan_2019.tflops(plan_2019.shape(layers=40, hidden=1536, heads=16), tp=1)
    assert found == pytest.approx(39, rel=0.06)
