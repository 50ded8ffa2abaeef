"""What the experiments of PTD-P conclude from results with a known answer."""

from collections.abc import Callable

import pytest

from mlm.reproduce.conclusion import Verdict
from mlm.reproduce.experiment import Experiment
from mlm.reproduce.ptdp import (
    bubble,
    interleaving,
    micro_batch,
    recomputation,
    scatter_gather,
    schedules,
    table1,
    tp_pp,
)
from mlm.reproduce.published import rows
from tests.pages import ROOT
from tests.reproduce.timed import Timed

Seconds = Callable[[str], float]


def numbers(name: str) -> list[int]:
    """`pp2-m4` → [2, 4]."""
    return [int("".join(filter(str.isdigit, part))) for part in name.split("-")]


def pipeline(ramp: float = 1.0) -> Seconds:
    """A pipeline with a ramp of so many times p - 1 micro-batches, and 0.2 s of one rank's outside it."""

    def seconds(name: str) -> float:
        p, m = numbers(name)
        return 0.2 / p + m + ramp * (p - 1)

    return seconds


@pytest.mark.parametrize(
    "seconds,rounds,verdict",
    [
        (pipeline(), 3, Verdict.AGREES),
        (pipeline(ramp=2), 3, Verdict.PARTLY),
        (pipeline(), 2, Verdict.OPEN),
        (lambda name: pipeline()(name) * (1 + numbers(name)[1] / 4), 3, Verdict.CONTRADICTS),
    ],
)
def test_the_bubble_is_p_less_1_micro_batches(seconds: Seconds, rounds: int, verdict: Verdict) -> None:
    assert bubble.conclude(Timed(bubble.EXPERIMENT, seconds, rounds=rounds)).verdict is verdict


def test_bubbles_by_step_times_are_those_of_the_formula() -> None:
    found = bubble.measured(Timed(bubble.EXPERIMENT, pipeline()), 2)
    for m in bubble.COUNTS:
        assert sorted(found.shares[m])[1] == pytest.approx(1 / m)
        assert found.waited[m] == [0.5] * 3
    assert sorted(found.idle)[1] == pytest.approx(1)


def interleaved(gain: float) -> Seconds:
    """Chunks that take off `gain` of the ramp."""

    def seconds(name: str) -> float:
        v, m = numbers(name)
        return m + (1 - gain if v == 2 else 1)

    return seconds


@pytest.mark.parametrize(
    "seconds,verdict",
    [
        (interleaved(0.5), Verdict.AGREES),
        (interleaved(0.0), Verdict.OPEN),
        (interleaved(-0.5), Verdict.CONTRADICTS),
        (lambda name: 1.0 if "vp2" in name else 1.1, Verdict.PARTLY),
    ],
)
def test_interleaving_gains_most_at_few_micro_batches(seconds: Seconds, verdict: Verdict) -> None:
    found = interleaving.conclude(Timed(interleaving.EXPERIMENT, seconds))
    assert found.verdict is verdict


def split(ramp: float, tensor: float) -> Seconds:
    """A ramp of the pipeline, against tensor parallelism whose micro-batch takes `tensor`."""

    def seconds(name: str) -> float:
        _, p, m = numbers(name)
        return m + ramp if p == 2 else tensor * m

    return seconds


@pytest.mark.parametrize(
    "seconds,verdict",
    [
        (split(1, 1.1), Verdict.AGREES),
        (split(1, 2), Verdict.PARTLY),
        (split(0, 1.1), Verdict.OPEN),
        (split(-0.5, 1), Verdict.CONTRADICTS),
    ],
)
def test_a_pipeline_gains_on_tensor_parallelism_with_its_batch(seconds: Seconds, verdict: Verdict) -> None:
    assert tp_pp.conclude(Timed(tp_pp.EXPERIMENT, seconds)).verdict is verdict


def micro(fixed: float, bubbles: bool = True) -> Seconds:
    """A batch of 16, of which each micro-batch takes a fixed time and that of its samples."""

    def seconds(name: str) -> float:
        p, b = numbers(name)
        return (16 / b + (p - 1 if bubbles else 0)) * (fixed + b) / p

    return seconds


@pytest.mark.parametrize(
    "seconds,verdict,best",
    [
        (micro(1), Verdict.AGREES, "4 is fastest"),
        (micro(0), Verdict.PARTLY, "1 is fastest"),
        (micro(0.5, bubbles=False), Verdict.PARTLY, "8 is fastest"),
        (lambda name: 1.0, Verdict.OPEN, ""),
    ],
)
def test_the_best_micro_batch_lies_between(seconds: Seconds, verdict: Verdict, best: str) -> None:
    found = micro_batch.conclude(Timed(micro_batch.EXPERIMENT, seconds))
    assert found.verdict is verdict
    assert best in found.seen


def recomputed(cost: float, ramp: float = 1.0) -> Seconds:
    """A pipeline of two stages whose micro-batches take `cost` times as long with recomputation."""

    def seconds(name: str) -> float:
        kind, _, count = name.partition("-m")
        return (int(count) + ramp) * (cost if kind == "full" else 1.0)

    return seconds


@pytest.mark.parametrize(
    "seconds,verdict",
    [
        (recomputed(1.33), Verdict.AGREES),
        (recomputed(1.33, ramp=0), Verdict.PARTLY),
        (recomputed(0.9), Verdict.CONTRADICTS),
        (recomputed(1.0), Verdict.OPEN),
    ],
)
def test_recomputation_pays_at_equal_memory(seconds: Seconds, verdict: Verdict) -> None:
    found = recomputation.conclude(Timed(recomputation.EXPERIMENT, seconds))
    assert found.verdict is verdict


def test_recomputation_concludes_nothing_of_runs_that_failed() -> None:
    results = Timed(recomputation.EXPERIMENT, recomputed(1.33), failed=("none-m1",))
    assert recomputation.conclude(results).verdict is Verdict.OPEN


def test_recomputation_makes_room_for_more_micro_batches() -> None:
    found = recomputation.measured(Timed(recomputation.EXPERIMENT))
    assert found.affordable(1) > 1


def test_schedules_have_the_bubbles_of_the_formulas() -> None:
    found = schedules.conclude(Timed(schedules.EXPERIMENT))
    assert found.verdict is Verdict.AGREES
    assert all(row[1] == pytest.approx(row[2]) for row in found.tables[0].rows)
    assert all("<svg" in drawing.svg for drawing in found.drawings)


def test_schedules_with_another_bubble_contradict() -> None:
    assert schedules.verdict(4, 4) is Verdict.CONTRADICTS
    assert schedules.verdict(1, 4) is Verdict.PARTLY


PLAN = {
    "layouts": [
        {
            **{"hardware_tflops": 150.0, "model_tflops": 110.0, "step_s": 2.0, "tokens_per_s": 1e5},
            **{"bubble": 0.1, "memory_bytes": 2.0**35},
        }
    ]
}


def test_table_1_has_a_row_of_each_model_with_the_published_number() -> None:
    found = table1.conclude(Timed(table1.EXPERIMENT, found=PLAN, failed=("1t",)))
    assert found.verdict is Verdict.PLANNED
    assert [row[5] for row in found.tables[0].rows] == [137, 138, 142, 135, 138, 140, 148, 155, 163, 163]
    assert [row[-1] for row in found.tables[0].rows] == [150.0] * 9 + ["does not fit"]


@pytest.mark.parametrize(
    "errors,model,verdict",
    [
        ((0.01, -0.02), (137, 163), Verdict.PLANNED),
        ((0.01, -0.2), (137, 163), Verdict.PARTLY),
        ((0.01, -0.2), (137, 120), Verdict.CONTRADICTS),
    ],
)
def test_table_1_agrees_row_by_row(
    errors: tuple[float, ...], model: tuple[float, ...], verdict: Verdict
) -> None:
    assert table1.verdict(errors, model) is verdict


def test_published_rows_are_those_of_the_scripts() -> None:
    ours = ROOT / "mlm/reproduce/published/sc21_table1.csv"
    assert ours.read_bytes() == (ROOT / "scripts/results/published/sc21_table1.csv").read_bytes()
    assert len(rows("sc21_table1")) == 10


def counted(split: int = 8) -> list[scatter_gather.Counted]:
    """Counts of layouts whose split sends so many times fewer bytes."""
    whole = 2 * scatter_gather.COUNT * 2 * scatter_gather.SEQ * scatter_gather.HIDDEN
    return [
        scatter_gather.Counted(chunks, is_split, chunks * whole // (split if is_split else 1), 10)
        for chunks in (1, 2)
        for is_split in (False, True)
    ]


@pytest.mark.parametrize(
    "split,gain,verdict",
    [(8, 1.1, Verdict.AGREES), (8, 1.03, Verdict.PARTLY), (4, 1.1, Verdict.PARTLY)],
)
def test_sequence_parallelism_sends_1_of_t_between_stages(split: int, gain: float, verdict: Verdict) -> None:
    assert scatter_gather.conclude_from(counted(split), [(12, gain)]).verdict is verdict


def test_no_count_of_the_formula_contradicts() -> None:
    off = [scatter_gather.Counted(each.chunks, each.is_split, each.stages + 1, 1) for each in counted()]
    assert scatter_gather.conclude_from(off, [(12, 1.1)]).verdict is Verdict.CONTRADICTS


def test_scatter_gather_raises_the_planned_throughput_most_at_small_batches() -> None:
    gains = [gain for _, gain in scatter_gather.planned_gains()]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 1


@pytest.mark.parametrize(
    "experiment",
    [each.EXPERIMENT for each in (interleaving, tp_pp, micro_batch, recomputation)],
    ids=lambda each: each.name,
)
def test_the_papers_scale_is_planned_where_some_layouts_do_not_fit(experiment: Experiment) -> None:
    results = Timed(experiment, scale="paper", found=PLAN, failed=("tp32", "b8", "none-batch256", "m60"))
    found = experiment.conclude(results)
    assert found.verdict is Verdict.PLANNED
    assert found.commands
    for chart in found.charts:
        assert all(y == y for series in chart.series for y in series.y)  # no NaN
