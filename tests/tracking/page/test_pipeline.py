"""Drawings agree with the plan that they show."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mlm.models.config import ModelConfig
from mlm.parallel.mesh import shape_context
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import GIB, MemoryModel
from mlm.plan.schedule import simulate
from mlm.tracking.page.pipeline import RunPlan, draw_layout, draw_memory, draw_schedule
from mlm.tracking.page.runs import read_run
from tests.plan.planned import planned_run
from tests.tracking.page.made import LAYOUT, MODEL, some_run, started, stepped, write_run

LARGE = ModelConfig(**{**MODEL, "num_layers": 64, "hidden_size": 1024})
LARGE_LAYOUT = PlannedLayout(tp=2, pp=2, dp=2, micro_batch=2, global_batch=16)
MEMORY = MemoryModel(counts_of(planned_run(LARGE, 32, dtype="fp32"), "cpu"))
PEAKS = [MEMORY.peak(LARGE_LAYOUT, stage) for stage in (0, 1)]


def plans(
    folder: Path, layout: dict[str, Any] | None = None, *records: dict[str, Any], **changed: Any
) -> RunPlan:
    own = {**LAYOUT, **(layout or {})}
    return RunPlan(
        read_run(write_run(folder, started(layout=own), stepped(1), *records, **own, **changed), "a")
    )


def test_ranks_stand_where_the_mesh_puts_them(tmp_path: Path) -> None:
    drawn = draw_layout(plans(tmp_path / "a", {"cp": 2}))
    cells = re.findall(r"<b>(\d+)</b> <small>P(\d) D(\d) C(\d) T(\d)</small>", drawn)
    assert len(cells) == 16
    for rank, p, d, c, t in cells:
        place = shape_context(int(rank), tp=2, pp=2, dp=2, cp=2)
        assert [place.pp.rank, place.dp.rank, place.cp.rank, place.tp.rank] == [
            int(p),
            int(d),
            int(c),
            int(t),
        ]


def test_ranks_are_counted(tmp_path: Path) -> None:
    assert "<p>8 ranks. " in draw_layout(plans(tmp_path / "a"))
    assert "<p>1 rank.<" in draw_layout(plans(tmp_path / "b", {"tp": 1, "pp": 1, "dp": 1}))


def test_stages_name_their_layers(tmp_path: Path) -> None:
    drawn = draw_layout(plans(tmp_path / "a", {"vp": 2}))
    assert "stage P0: embedding, layers 0, 2<" in drawn
    assert "stage P1: layers 1, 3, output<" in drawn
    assert "stage P3: layer 3, output<" in draw_layout(plans(tmp_path / "b", {"pp": 4}))


def test_a_large_layout_is_drawn_in_part_and_says_so(tmp_path: Path) -> None:
    drawn = draw_layout(plans(tmp_path / "a", {"tp": 8, "pp": 64, "dp": 6}))
    assert len(re.findall("<small>", drawn)) <= 128
    assert "3,072 ranks" in drawn
    assert "Drawn are the first of pp=64, dp=6" in drawn


def test_a_schedule_has_every_computation_and_its_bubble(tmp_path: Path) -> None:
    drawn = draw_schedule(plans(tmp_path / "a"))  # 4 micro-batches, 2 stages
    assert len(re.findall(r'class="op[FB]" x', drawn)) == 2 * 2 * 4
    assert "bubble 25.0% of the ideal time" in drawn
    assert "20.0%" in drawn


def test_a_long_schedule_is_drawn_in_part_with_the_idle_time_of_all(tmp_path: Path) -> None:
    train = {"steps": 100, "global_batch_size": 40_000, "micro_batch_size": 2}
    drawn = draw_schedule(plans(tmp_path / "a", train=train))
    assert "of its 10000 micro-batches" in drawn
    assert "<td>0.0%</td>" in drawn
    assert len(drawn) < 200_000


def test_waiting_is_measured_beside_the_plan(tmp_path: Path) -> None:
    times = [{"host": "n", "computing": 3.0, "waiting over pp": 1.0}] * 4
    slow = [{"host": "n", "computing": 1.0, "waiting over pp": 1.0}] * 4
    drawn = draw_schedule(plans(tmp_path / "a", {}, {"kind": "ranks", "step": 1, "ranks": [*times, *slow]}))
    assert re.findall(r"<td>([\d.]+%)</td><td>([\d.]+%)</td></tr>", drawn) == [
        ("25.0%", "75.0%"),
        ("50.0%", "50.0%"),
    ]


@pytest.mark.parametrize(
    "ranks", ["x", [], [1] * 8, [{"computing": "x"}] * 8, [{"computing": float("nan")}] * 8]
)
def test_damaged_times_of_ranks_are_not_recorded(tmp_path: Path, ranks: Any) -> None:
    assert "not recorded" in draw_schedule(
        plans(tmp_path / "a", {}, {"kind": "ranks", "step": 1, "ranks": ranks})
    )


PLANNED = (  # of 2 stages and 4 micro-batches: forward 1 ms, backward 2 ms, on the whole 3 ms late
    "F0 F1 B0 F2 B1 F3 B2 B3",
    "F0 B0 F1 B1 F2 B2 F3 B3",
)


def timed(changed: dict[tuple[int, int], Any] | None = None) -> dict[str, Any]:
    """Record of a step that follows the plan, its second half 3 ms later; `changed` replaces rows."""
    plan = simulate(PlanScheduleConfig(pp=2, micro_batches=4))
    stages: list[list[Any]] = []
    for rank, spans in enumerate(plan.timeline):
        assert " ".join(str(span.action) for span in spans) == PLANNED[rank]
        stages.append([])
        for span in spans:
            late = 3.0 if span.start >= 9 else 0.0
            times = (span.start + late, span.start + late, span.end + late)
            stages[-1].append([str(span.action)[0], 0, span.action.micro_batch, *times])
    for (rank, number), row in (changed or {}).items():
        stages[rank][number] = row
    return {"kind": "timeline", "step": 7, "time": 1.0, "aligned": "clock", "stages": stages}


def test_a_measured_step_is_drawn_below_the_plan_at_its_scale(tmp_path: Path) -> None:
    drawn = draw_schedule(plans(tmp_path / "a", {}, timed())).replace("\n", " ")
    planned, measured = drawn.split("<svg")[1:]
    rect = r'class="op[FB]" x="([\d.e+]+)" y="\d+" width="([\d.]+)"'
    ends = [[float(x) + float(width) for x, width in re.findall(rect, each)] for each in (planned, measured)]
    assert [len(each) for each in ends] == [16, 16]
    assert max(ends[0]) == pytest.approx(1000 * 15 / 18, abs=2)
    assert max(ends[1]) == pytest.approx(1000, abs=2)
    assert "forward 1 ms, backward 2 ms" in drawn
    assert "15 ms. Measured in the first replica: 18 ms, bubble 50.0%" in drawn
    assert re.findall(r"<td>([\d.]+%)</td><td>([\d.]+%)</td><td>\d</td>", drawn) == [("20.0%", "33.3%")] * 2


@pytest.mark.parametrize(
    "row",
    [
        *(None, [], "F", ["F", 0, 0, 0.0, 0.0], ["X", 0, 0, 0.0, 0.0, 1.0], ["F", 0, 9, 0.0, 0.0, 1.0]),
        *(["F", 0, 0, 2.0, 2.0, 1.0], ["F", 0, 0, 0.0, None, 1.0], ["F", 0, 0, 0.0, 0.0, 1e300]),
        ["F", [], {}, 0.0, 0.0, 1.0],
    ],
    ids=str,
)
def test_damaged_times_of_a_step_are_left_out(tmp_path: Path, row: Any) -> None:
    assert "measured in step" not in draw_schedule(plans(tmp_path / "a", {}, timed({(0, 0): row})))


def test_a_measured_step_of_another_layout_is_left_out(tmp_path: Path) -> None:
    assert "measured in step" in draw_schedule(plans(tmp_path / "a", {}, timed()))
    for number, layout in enumerate(({"pp": 4}, {"dp": 1}, {"pipeline": "zb_h1"})):
        assert "measured in step" not in draw_schedule(plans(tmp_path / str(number), layout, timed()))


def test_memory_is_that_of_the_plan(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", started(memory=[asdict(peak) for peak in PEAKS]), stepped(1))
    drawn = draw_memory(RunPlan(read_run(run, "a")))
    for peak in PEAKS:
        assert f"<td>{peak.total / GIB:.3g}</td>" in drawn
    assert "Planned for a CPU" in drawn
    assert "Rank 0 logged 1.00 GiB" in drawn


@pytest.mark.parametrize(
    "damaged",
    [
        {"parts": {}},
        {"parts": {**PEAKS[0].parts, "weights": -1.0}},
        {"parts": {**PEAKS[0].parts, "weights": float("nan")}},
        {"parts": dict.fromkeys(PEAKS[0].parts, 0)},
        {"moment": "<b>"},
        {"parameters": "many"},
    ],
    ids=str,
)
def test_damaged_memory_is_not_drawn(tmp_path: Path, damaged: dict[str, Any]) -> None:
    records = [asdict(PEAKS[0]), {**asdict(PEAKS[1]), **damaged}]
    for number, memory in enumerate((records, [3], 3)):
        run = write_run(tmp_path / str(number), started(memory=memory), stepped(1))
        assert draw_memory(RunPlan(read_run(run, "a"))) == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"kind": "someone.else:FAMILY"}},
        {"tp": -1},
        {"pp": 10**30},
        {"dp": "x"},
        {"model": 3},
        {"vp": 99},
    ],
    ids=str,
)
def test_settings_that_no_formula_knows_have_no_memory(tmp_path: Path, changed: dict[str, Any]) -> None:
    folder = write_run(tmp_path / "a", stepped(1), **changed)
    its = RunPlan(read_run(folder, "a"))
    assert draw_layout(its)
    draw_schedule(its)
    assert draw_memory(its) == ""


def test_one_rank_has_no_schedule(tmp_path: Path) -> None:
    run = some_run(tmp_path / "a", pp=1)
    (run / "metrics.jsonl").write_text("")
    assert draw_schedule(RunPlan(read_run(run, "a"))) == ""
