"""Terms of a device's memory, each against its equation."""

from dataclasses import replace
from typing import Literal

import pytest

from mlm.models.config import ModelConfig
from mlm.plan.memory import ALLOCATOR, MemoryModel, StepMemory
from mlm.plan.shape import PlannedLayout

MODEL = ModelConfig(
    num_layers=8,
    hidden_size=64,
    num_heads=4,
    max_positions=32,
    vocab_size=1000,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
BOUNDARY = 2 * 32 * 64
"""Bytes of one activation [S, B, H] of one sample in bf16."""


def moving(layout: PlannedLayout, rank: int = 0, model: ModelConfig = MODEL) -> StepMemory:
    memory = MemoryModel(model, 32)
    return StepMemory(memory, layout, rank, memory.held(layout, rank))


def test_weights_are_gathered_whole_or_two_layers_at_a_time() -> None:
    """With zero=2, and with zero=3: of a stage of one layer that one; outside the layers always all."""
    two, three = PlannedLayout(dp=2, zero=2, global_batch=8), PlannedLayout(dp=2, zero=3, global_batch=8)
    held = moving(two).held
    assert moving(two).backward_begins()["cast weights"] == 2 * held.whole
    assert moving(three).backward_begins()["cast weights"] == 2 * (held.ends + 2 * held.layer)
    single = moving(three, model=replace(MODEL, num_layers=1))
    assert single.backward_begins()["cast weights"] == 2 * single.held.whole


def test_cast_weights_leave_learned_positions_out() -> None:
    """They are in the first stage; the optimizer casts for the next step."""
    layout = PlannedLayout(pp=2, global_batch=8)
    for rank, positions in ((0, 32 * 64), (1, 0)):
        found = moving(layout, rank)
        expected = 2 * (found.held.whole - positions)
        assert found.backward_begins()["cast weights"] == expected
        assert found.optimizer_steps()["cast weights"] == expected


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (PlannedLayout(dp=2, zero=2, global_batch=8), "whole"),
        (PlannedLayout(dp=2, zero=2, global_batch=2), "none"),
        (PlannedLayout(dp=2, zero=2, zero_reduce="every", global_batch=8), "parameters"),
        (PlannedLayout(dp=2, zero=2, zero_reduce="every", global_batch=2), "none"),
        (PlannedLayout(dp=2, global_batch=2), "whole"),  # flat buffers
        (PlannedLayout(global_batch=4), "whole"),
    ],
    ids=str,
)
def test_gradients_before_the_first_backward_pass_are_those_of_earlier_ones(
    layout: PlannedLayout, expected: Literal["whole", "parameters", "none"]
) -> None:
    found = moving(layout)
    elements = 0 if expected == "none" else getattr(found.held, expected)
    assert found.backward_begins()["gradients"] == 4 * elements


def test_full_recomputation_keeps_one_layer_and_the_inputs_of_all() -> None:
    layout = PlannedLayout()
    none, full = (
        moving(replace(layout, recompute=how)).backward_begins()["activations"]  # type: ignore[arg-type]
        for how in ("none", "full")
    )
    assert none - full == 7 * moving(layout)._kept - 8 * BOUNDARY


@pytest.mark.parametrize(("pipeline", "kept"), [("1f1b", 1), ("gpipe", 4)])
def test_the_last_stage_keeps_the_input_of_the_final_norm(
    pipeline: Literal["1f1b", "gpipe"], kept: int
) -> None:
    """Of each micro-batch between its loss and its backward pass."""
    found = moving(PlannedLayout(pp=4, pipeline=pipeline, global_batch=4), 3)
    working = found._backward_of_a_layer()
    assert found.backward_begins()["activations"] - working == kept * (2 * found._kept + BOUNDARY)


@pytest.mark.parametrize(("batch", "sends"), [(4, 4), (32, 8)])
def test_a_pipeline_holds_its_sends_and_what_it_receives(batch: int, sends: int) -> None:
    assert moving(PlannedLayout(pp=2, global_batch=batch)).backward_begins()["communication"] == (
        (sends + 2) * BOUNDARY
    )
    assert moving(PlannedLayout(global_batch=batch)).backward_begins()["communication"] == 0


def test_a_gathered_sequence_is_there_once_forward_and_once_backward() -> None:
    """Beside it a pipeline's boundaries are split."""
    split = PlannedLayout(tp=2, pp=2, sequence_parallel=True, global_batch=4)
    assert moving(split).backward_begins()["communication"] == 6 * BOUNDARY / 2 + 2 * BOUNDARY


def test_sharded_units_are_gathered_and_reduced_through_buffers_of_the_largest() -> None:
    """A message in bf16, its gradient in float32."""
    found = moving(PlannedLayout(dp=2, zero=3, global_batch=8))
    largest = max(found.held.layer, found.held.ends)
    assert found.backward_begins()["communication"] == (2 + 4) * largest


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_allocator_loses_a_share_and_a_cpus_heap_a_gradient(device: str) -> None:
    peak = MemoryModel(MODEL, 32, device=device, reserved=1000.0).peak(PlannedLayout(global_batch=4))
    moved = sum(peak.parts[n] for n in ("activations", "vocabulary", "communication", "cast weights"))
    heap = 4 * peak.parameters if device == "cpu" else 0
    assert peak.parts["allocator"] == pytest.approx(1000 + ALLOCATOR * moved + heap)


@pytest.mark.parametrize(
    ("layers", "fullest"),
    [(8, 3), (9, 1)],  # the projection of the vocabulary; the layer that is left over
)
def test_the_worst_peak_is_that_of_the_fullest_rank(layers: int, fullest: int) -> None:
    vocabulary = 4000 if fullest == 3 else 64
    memory = MemoryModel(replace(MODEL, num_layers=layers, vocab_size=vocabulary, vocab_multiple=8), 32)
    layout = PlannedLayout(pp=4, micro_batch=8, global_batch=8 * 4)
    peaks = [memory.peak(layout, rank).total for rank in range(4)]
    assert peaks.index(max(peaks)) == fullest
    assert memory.worst(layout).total == max(peaks)
