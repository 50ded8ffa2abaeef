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
from mlm.verify.resume import FIELDS, Facts, Runs, facts_of, judge
from mlm.verify.verdict import Verdict

ULP = math.ulp(6.0)
COUNTERS = {"step": 4, "consumed_samples": 32, "applied_steps": 4.0, "scaler": {"scale": 1.0}}
WEIGHT, MOMENT = "model.w", "optimizer.exp_avg.w"


def record(step: int, **changed: Any) -> dict[str, Any]:
    numbers = {"loss": 6.0 - step / 10, "grad_norm": 2.0, "lr": 1e-3, "loss_scale": None, "skipped_steps": 0}
    return {"kind": "step", "step": step, **numbers, "tokens": 128 * step, **changed}


def tensor(name: str, largest: float = 0.0, scale: float = 1.0) -> TensorDifference:
    return TensorDifference(name, differing=int(largest > 0), elements=10, largest=largest, scale=scale)


def computed(steps: dict[int, dict[str, Any]] | None = None, **state: Any) -> Facts:
    """Four steps and the counters of the last checkpoint, but for what is given."""
    records = {step: record(step) | (steps or {}).get(step, {}) for step in range(1, 5)}
    facts = {(step, key): each[key] for step, each in records.items() for key in FIELDS}
    return facts | {(4, f"{key} in the last checkpoint"): v for key, v in (COUNTERS | state).items()}


def runs(*tensors: TensorDifference, **changed: Any) -> Runs:
    """Four steps, killed after the checkpoint of the second; equal but for what is given."""
    manifest = Manifest(4, "id", {}, {}, {})
    final = CheckpointComparison(manifest, manifest, (), (), (), tensors or (tensor(WEIGHT), tensor(MOMENT)))
    return replace(Runs(KillPlan(0, 2, 4), computed(), computed(), (0, 2), final), **changed)


def resumed(step: int, **changed: Any) -> Verdict:
    """The verdict on runs of which one step of the second differs."""
    return judge(runs(resumed=computed({step: changed})))


def test_equal_runs_are_equal() -> None:
    """With the digest of a run with exact sums."""
    verdict = judge(runs(digest="sha256:12"))
    assert verdict.word == "EQUAL bit for bit"
    assert verdict.sentence.endswith("4 steps, then 2 tensors of 20 elements, sha256:12")


def test_the_last_bit_of_a_loss_counts() -> None:
    """The first difference is named."""
    changed = {"loss": record(3)["loss"] + ULP}
    verdict = judge(runs(resumed=computed({4: {"loss": 1.0}, 3: changed})))
    assert verdict.word == "DIFFERENT"
    assert verdict.sentence.startswith("the first difference is in loss of step 3: 5.7 straight, 5.70000")


@pytest.mark.parametrize(
    "changed", [{"lr": 1.0000001e-3}, {"loss_scale": 2.0}, {"skipped_steps": 1}, {"tokens": 385}], ids=str
)
def test_counters_of_a_step_are_exact(changed: dict[str, Any]) -> None:
    assert "of step 3" in resumed(3, **changed).sentence


def test_before_the_kill_the_run_itself_is_suspect() -> None:
    verdict = resumed(2, loss=record(2)["loss"] + ULP)
    assert "of step 2" in verdict.sentence
    assert "does not repeat itself" in verdict.hint


def test_a_number_that_is_not_finite_equals_its_like_alone() -> None:
    lost = computed({3: {"grad_norm": None}})
    assert judge(runs(straight=lost, resumed=lost)).equal
    assert not judge(runs(straight=lost)).equal
    assert not judge(runs(resumed=lost)).equal


def test_a_step_without_a_record_is_a_difference() -> None:
    short = {key: value for key, value in computed().items() if key[0] != 3}
    assert judge(runs(resumed=short)).sentence.endswith("loss of step 3: 5.7 straight, 'no record' resumed")
    assert not judge(runs(straight=short)).equal


@pytest.mark.parametrize("starts", [(0,), (0, 0), (0, 2, 2), ()], ids=str)
def test_a_run_that_did_not_resume_at_the_checkpoint_is_different(starts: tuple[int, ...]) -> None:
    """Even if all its numbers are right: it would have trained those steps again."""
    verdict = judge(runs(starts=starts))
    assert verdict.word == "DIFFERENT"
    assert "from step 2" in verdict.sentence


@pytest.mark.parametrize("key", COUNTERS)
def test_each_counter_of_the_last_checkpoint_is_compared(key: str) -> None:
    assert f"first difference is in {key}" in judge(runs(resumed=computed(**{key: 99}))).sentence


@pytest.mark.parametrize("name", [WEIGHT, MOMENT])
def test_one_bit_of_a_tensor_counts(name: str) -> None:
    verdict = judge(runs(tensor(WEIGHT), tensor(name, 1e-12)))
    assert verdict.word == "DIFFERENT"
    assert f"1 of 2 tensors differ, {name} most" in verdict.sentence


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ({"only_first": ("model.a",)}, "1 are only in the first"),
        ({"only_second": ("model.a",)}, "1 in the second"),
        ({"forms": (FormDifference("model.a", "", ""),)}, "1 have another shape"),
    ],
    ids=str,
)
def test_a_tensor_that_both_do_not_hold_alike_is_a_difference(lacking: dict[str, Any], words: str) -> None:
    found = runs()
    verdict = judge(replace(found, final=replace(found.final, **lacking)))
    assert verdict.word == "DIFFERENT"
    assert words in verdict.sentence


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
    facts = facts_of(path, Manifest(3, "id", {}, {}, {"step": 3, "config": {"out": "its own"}}))
    assert [step for step, key in facts if key == "loss"] == [1, 2, 3]
    assert facts[3, "loss"] == 0.1 + 0.2
    assert list(facts)[-1] == (3, "step in the last checkpoint")
