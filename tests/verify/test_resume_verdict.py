"""The verdict on a resumed run, from metrics and comparisons made by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native.compare import CheckpointComparison, FormDifference, TensorDifference
from mlm.checkpoint.native.format import Manifest
from mlm.verify.config import KillPlan
from mlm.verify.resume import May, Runs, beyond, judge, read_starts, read_steps
from mlm.verify.verdict import FLOOR, TOLERANCES

FP32 = TOLERANCES["fp32"]
SAME, OTHER = None, FP32
ULP = math.ulp(6.0)
COUNTERS = {"step": 4, "consumed_samples": 32, "applied_steps": 4.0, "scaler": {"scale": 1.0}}
WEIGHT, MOMENT, SQUARE = "model.w", "optimizer.exp_avg.w", "optimizer.exp_avg_sq.w"


def record(step: int, **changed: Any) -> dict[str, Any]:
    numbers = {"loss": 6.0 - step / 10, "grad_norm": 2.0, "lr": 1e-3, "loss_scale": None, "skipped_steps": 0}
    return {"kind": "step", "step": step, **numbers, "tokens": 128 * step, **changed}


def tensor(name: str, largest: float = 0.0, scale: float = 1.0) -> TensorDifference:
    return TensorDifference(name, differing=int(largest > 0), elements=10, largest=largest, scale=scale)


def runs(*tensors: TensorDifference, **changed: Any) -> Runs:
    """Four steps, killed after the checkpoint of the second; equal but for what is given."""
    manifest = Manifest(4, "id", {}, {}, {**COUNTERS, "config": {}, "versions": {}})
    steps = {step: record(step) for step in range(1, 5)}
    final = CheckpointComparison(manifest, manifest, (), (), (), tensors or (tensor(WEIGHT), tensor(MOMENT)))
    return replace(Runs(KillPlan(0, 2, 4), steps, steps, (0, 2), final), **changed)


def resumed(step: int, **changed: Any) -> Runs:
    """Runs of which one step of the second differs."""
    equal = runs()
    return replace(equal, resumed={**equal.resumed, step: record(step, **changed)})


@pytest.mark.parametrize("may", [SAME, OTHER], ids=["same", "other"])
def test_equal_runs_are_equal(may: May) -> None:
    verdict = judge(runs(), may)
    assert verdict.word == "EQUAL"
    assert "4 steps, then 2 tensors of 20 elements" in verdict.sentence


def test_on_the_same_layout_the_last_bit_of_a_loss_counts() -> None:
    verdict = judge(resumed(3, loss=record(3)["loss"] + ULP), SAME)
    assert verdict.word == "DIFFERENT"
    assert verdict.sentence.startswith("the first difference is in the loss of step 3: 5.7 straight, 5.70000")


def test_on_another_layout_rounding_is_allowed_and_reported() -> None:
    verdict = judge(resumed(3, loss=record(3)["loss"] + 8e-6, grad_norm=2.0 + FP32.norm), OTHER)
    assert verdict.word == "EQUAL"
    assert "losses to 8.0e-06" in verdict.sentence


@pytest.mark.parametrize("changed", [{"loss": 5.7 + 2e-5}, {"grad_norm": 2.0 * (1 + 2 * FP32.norm)}], ids=str)
def test_on_another_layout_more_than_rounding_is_a_difference(changed: dict[str, float]) -> None:
    assert judge(resumed(3, **changed), OTHER).word == "DIFFERENT"


@pytest.mark.parametrize(
    "changed", [{"lr": 1.0000001e-3}, {"loss_scale": 2.0}, {"skipped_steps": 1}, {"tokens": 385}], ids=str
)
def test_counters_of_a_step_are_exact_on_any_layout(changed: dict[str, Any]) -> None:
    verdict = judge(resumed(3, **changed), OTHER)
    assert verdict.word == "DIFFERENT"
    assert "of step 3" in verdict.sentence


def remembered(**changed: Any) -> Runs:
    """Runs whose second ends with another memory of incidents."""
    memory = {"recent": [[6.0, 2.0], [5.9, 2.0]], "left_out_samples": [], "rewinds": 0}
    first, second = (
        Manifest(4, "id", {}, {}, {**COUNTERS, "incidents": incidents, "config": {}, "versions": {}})
        for incidents in (memory, {**memory, **changed})
    )
    return runs(final=replace(runs().final, first=first, second=second))


ROUNDED = {"recent": [[6.0 + 8e-6, 2.0], [5.9, 2.0 + FP32.norm]]}


def test_remembered_losses_and_norms_are_exact_on_the_same_layout_and_rounded_on_another() -> None:
    assert judge(remembered(**ROUNDED), OTHER).word == "EQUAL"
    verdict = judge(remembered(**ROUNDED), SAME)
    assert verdict.word == "DIFFERENT"
    assert "incidents of the last checkpoint's state" in verdict.sentence


@pytest.mark.parametrize(
    "changed",
    [
        {"recent": [[6.2, 2.0], [5.9, 2.0]]},
        {"recent": [[6.0, 2.0]]},
        {"left_out_samples": [[0, 8]]},
        {"rewinds": 1},
        {"more": 0},
    ],
    ids=str,
)
def test_what_is_remembered_of_incidents_beyond_rounding_differs_on_any_layout(
    changed: dict[str, Any],
) -> None:
    assert judge(remembered(**changed), OTHER).word == "DIFFERENT"


def test_before_the_kill_nothing_may_differ_even_where_the_layout_changes_later() -> None:
    verdict = judge(resumed(2, loss=record(2)["loss"] + ULP), OTHER)
    assert "of step 2" in verdict.sentence
    assert "before the kill" in verdict.sentence
    assert "does not repeat itself" in verdict.hint


def test_the_first_difference_is_the_one_named() -> None:
    found = resumed(4, loss=1.0)
    found = replace(found, resumed={**found.resumed, 3: record(3, grad_norm=9.0)})
    assert "gradient norm of step 3" in judge(found, SAME).sentence


def test_a_number_that_is_not_finite_equals_its_like_alone() -> None:
    straight = {**runs().straight, 3: record(3, grad_norm=None)}
    assert judge(runs(straight=straight, resumed=straight), OTHER).word == "EQUAL"
    for one, other in ((None, 2.0), (2.0, None)):
        sides = [{**straight, 3: record(3, grad_norm=value)} for value in (one, other)]
        assert judge(runs(straight=sides[0], resumed=sides[1]), OTHER).word == "DIFFERENT"


def test_a_step_without_a_record_is_a_difference() -> None:
    found = runs(resumed={step: record(step) for step in (1, 2, 4)})
    assert judge(found, SAME).sentence.endswith("step 3: the resumed run has no record of it")


@pytest.mark.parametrize("starts", [(0,), (0, 0), (0, 2, 2), ()], ids=str)
def test_a_run_that_did_not_resume_at_the_checkpoint_is_different(starts: tuple[int, ...]) -> None:
    """Even if all its numbers are right: it would have trained those steps again."""
    verdict = judge(runs(starts=starts), SAME)
    assert verdict.word == "DIFFERENT"
    assert "from step 2" in verdict.sentence


@pytest.mark.parametrize("key", COUNTERS)
def test_each_counter_of_the_last_checkpoint_is_compared(key: str) -> None:
    found = runs()
    second = replace(found.final.second, state={**found.final.second.state, key: 99})
    verdict = judge(replace(found, final=replace(found.final, second=second)), OTHER)
    assert f"first difference is in {key}" in verdict.sentence


def test_settings_of_the_last_checkpoint_may_differ() -> None:
    found = runs()
    second = replace(found.final.second, state={**found.final.second.state, "config": {"out": "other"}})
    assert judge(replace(found, final=replace(found.final, second=second)), SAME).word == "EQUAL"


@pytest.mark.parametrize("name", [WEIGHT, MOMENT])
def test_on_the_same_layout_one_bit_of_a_tensor_counts(name: str) -> None:
    verdict = judge(runs(tensor(WEIGHT), tensor(name, 1e-12)), SAME)
    assert verdict.word == "DIFFERENT"
    assert f"{name} differs in 1 of 10 elements" in verdict.sentence


@pytest.mark.parametrize(
    "name,limit",
    [
        (WEIGHT, FP32.weight * 2e-3),  # two steps follow the kill, of learning rate 1e-3
        (MOMENT, FP32.later * 0.5),
        (SQUARE, 2 * FP32.later * 0.5),
    ],
)
def test_on_another_layout_a_tensor_has_its_tolerance(name: str, limit: float) -> None:
    assert beyond(runs(tensor(name, 0.99 * limit, scale=0.5)), OTHER) == []
    for wrong in (1.01 * limit, math.inf, math.nan):
        assert beyond(runs(replace(tensor(name, 1.0, scale=0.5), largest=wrong)), OTHER)


def test_a_moment_that_is_next_to_nothing_is_measured_against_the_largest_of_its_kind() -> None:
    large, small = tensor(MOMENT, scale=1.0), "optimizer.exp_avg.b"
    assert beyond(runs(large, tensor(small, 0.9 * FP32.later * FLOOR, scale=1e-9)), OTHER) == []
    assert beyond(runs(large, tensor(small, 1.1 * FP32.later * FLOOR, scale=1e-9)), OTHER)


@pytest.mark.parametrize(
    "lacking",
    [
        {"only_first": ("model.a",)},
        {"only_second": ("model.a",)},
        {"forms": (FormDifference("model.a", "", ""),)},
    ],
    ids=str,
)
def test_a_tensor_that_both_do_not_hold_alike_is_a_difference(lacking: dict[str, Any]) -> None:
    found = runs()
    verdict = judge(replace(found, final=replace(found.final, **lacking)), OTHER)
    assert verdict.sentence.startswith("model.a")


def test_records_of_a_killed_and_resumed_run_are_read_in_order(tmp_path: Path) -> None:
    """A line that a kill tore, and kinds that are not compared, are passed over."""
    lines = [
        {"kind": "run", "start_step": 0},
        record(1),
        record(2),
        {"kind": "saved", "step": 2},
        {"kind": "run", "start_step": 2},
        record(3, loss=0.1 + 0.2),
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "st')
    assert read_starts(path) == (0, 2)
    assert list(read_steps(path)) == [1, 2, 3]
    assert read_steps(path)[3]["loss"] == 0.1 + 0.2
