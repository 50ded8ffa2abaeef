"""Terms of a device's memory that no module is asked for, each against its rule."""

from dataclasses import replace

import pytest

from mlm.models.shape import count_parameters, flops_per_token
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import ALLOCATOR
from tests.plan.planned import GPT2, LLAMA, memory_of, planned_run

MODEL = replace(GPT2, num_layers=8, hidden_size=64)
MEMORY = memory_of(MODEL)
BOUNDARY = 2 * 32 * 64
"""Bytes of one activation [S, B, H] of one sample in bf16."""


def begins(layout: PlannedLayout, rank: int = 0) -> dict[str, float]:
    return MEMORY.backward_begins(layout, rank, MEMORY.state(layout, rank))


def test_weights_are_gathered_whole_or_two_layers_at_a_time() -> None:
    """With zero=2, and with zero=3; outside the layers always all."""
    two, three = PlannedLayout(dp=2, zero=2, global_batch=8), PlannedLayout(dp=2, zero=3, global_batch=8)
    state = MEMORY.state(two, 0)
    assert begins(two)["cast weights"] == 2 * state.gathered
    assert begins(three)["cast weights"] == 2 * (state.ends + 2 * state.layer)


@pytest.mark.parametrize(("batch", "sends"), [(4, 4), (32, 8)])
def test_a_pipeline_holds_its_sends_and_what_it_receives(batch: int, sends: int) -> None:
    assert begins(PlannedLayout(pp=2, global_batch=batch))["communication"] == (sends + 2) * BOUNDARY
    split = PlannedLayout(pp=2, cp=2, tp=2, sequence_parallel=True, global_batch=batch)
    assert begins(split)["communication"] == (sends + 2) * BOUNDARY / 4
    assert begins(PlannedLayout(global_batch=batch))["communication"] == 0


def test_sharded_units_are_gathered_and_reduced_through_buffers_of_the_largest() -> None:
    """A message in bf16, its gradient in float32."""
    layout = PlannedLayout(dp=2, zero=3, global_batch=8)
    state = MEMORY.state(layout, 0)
    assert begins(layout)["communication"] == (2 + 4) * max(state.layer, state.ends)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_allocator_loses_a_share_and_a_cpus_heap_a_gradient(device: str) -> None:
    peak = memory_of(MODEL, device, 1000.0).peak(PlannedLayout(global_batch=4))
    moved = sum(peak.parts[n] for n in ("activations", "vocabulary", "communication", "cast weights"))
    heap = 4 * peak.parameters if device == "cpu" else 0
    assert peak.parts["allocator"] == pytest.approx(1000 + ALLOCATOR * moved + heap)


@pytest.mark.parametrize(
    ("layers", "fullest"),
    [(8, 3), (9, 1)],  # the projection of the vocabulary; the layer that is left over
)
def test_the_worst_peak_is_that_of_the_fullest_rank(layers: int, fullest: int) -> None:
    vocabulary = 4000 if fullest == 3 else 64
    memory = memory_of(replace(MODEL, num_layers=layers, vocab_size=vocabulary, vocab_multiple=8))
    layout = PlannedLayout(pp=4, micro_batch=8, global_batch=8 * 4)
    peaks = [memory.peak(layout, rank).total for rank in range(4)]
    assert peaks.index(max(peaks)) == fullest
    assert memory.worst(layout).total == max(peaks)


WINDOWED = replace(
    LLAMA,
    num_layers=8,
    options={"num_kv_heads": 1, "window": 8, "window_layers": "ssf", "output_norms": True},
)


def test_layers_of_another_window_are_planned_for_themselves() -> None:
    """By their numbers in the model; of parameters they have the same."""
    counts = counts_of(planned_run(WINDOWED), "gpu")
    assert counts.kinds == (0, 0, 2, 0, 0, 2, 0, 0)
    plain = replace(WINDOWED, options={**WINDOWED.options, "window": 0, "window_layers": ""})
    assert counts_of(planned_run(plain), "gpu").kinds == (0,) * 8
    assert count_parameters(WINDOWED) == count_parameters(plain)


def test_operations_are_those_of_each_layers_window() -> None:
    """6 of 8 layers see 8 of 32 tokens, whose scores are S W - W^2/2 of the S^2/2 under the mask."""
    full = replace(WINDOWED, options={**WINDOWED.options, "window": 0, "window_layers": ""})
    attention = 12 * 4 * 12 * 32  # 12 N D S of a layer
    saved = attention * (1 - 8 * (2 - 8 / 32) / 32)
    assert flops_per_token(full, 32) - flops_per_token(WINDOWED, 32) == pytest.approx(6 * saved)
