"""The time model: operations equal the papers', the pipeline equals the simulator, parts sum to the whole."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.models.config import ModelConfig
from mlm.parallel.pipeline.actions import Cost
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.plan import pipeline_time as module
from mlm.plan.cost import PARTS, CostModel
from mlm.plan.hardware import HardwareConfig, preset
from mlm.plan.pipeline_time import pipeline_time
from mlm.plan.search import Query, layouts
from mlm.plan.shape import PlannedLayout, Shape

MODEL = ModelConfig(num_layers=24, hidden_size=2048, num_heads=16, vocab_size=51200, vocab_multiple=1)
SHAPE = Shape(MODEL, 1024)


def hardware() -> HardwareConfig:
    """A node of eight GPUs, with a network of 25 GB/s each."""
    return preset("dgx_a100_80g")


@pytest.mark.parametrize(
    ("layers", "hidden", "heads"), [(24, 2304, 24), (128, 25600, 160), (105, 20480, 128)]
)
def test_operations_equal_equation_3_of_sc21(layers: int, hidden: int, heads: int) -> None:
    """96 B S L H^2 (1 + S/6H + V/16LH), in whole numbers."""
    batch, seq, vocab = 1536, 2048, 51200
    model = replace(MODEL, num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=vocab)
    shape = Shape(model, seq)
    bracket = 1 + Fraction(seq, 6 * hidden) + Fraction(vocab, 16 * layers * hidden)
    assert shape.hardware_flops("full", batch) == 96 * batch * seq * layers * hidden**2 * bracket


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_model_operations_equal_those_of_the_training_loop(kind: str) -> None:
    model = ModelConfig(
        kind=kind,
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        token_types=2 * (kind == "bert"),
        max_positions=32,
    )
    found = Shape(model, 32, tp=2).model_flops(5)
    expected = model.flops_per_token(32, tp=2) * 32 * 5
    # BERT's shape leaves out the transform of its masked tokens: 0.15 H^2 of a model of 12 L H^2
    assert found == pytest.approx(expected, rel=1e-9 if kind == "gpt2" else 0.01)


@pytest.mark.parametrize("micro_batches", [4, 8, 60, 61])
@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("1f1b", 3), ("gpipe", 1), ("gpipe", 2), ("zb_h1", 1)]
)
def test_pipeline_time_equals_the_simulated_plan(
    name: str, chunks: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunks > 1 and name == "1f1b" and micro_batches % 4:
        pytest.skip("interleaving takes micro-batches in groups")
    monkeypatch.setattr(module, "LEAST_SIMULATED", 0)  # long steps are extended
    cost = Cost(forward=1.0, backward=2.1, input_gradient=1.2, weight_gradient=0.9, transfer=0.1)
    schedule = build_schedule(name, stages=4, chunks=chunks, micro_batches=micro_batches)
    found = pipeline_time(name, 4, chunks, micro_batches, [cost] * (4 * chunks))  # type: ignore[arg-type]
    assert found == pytest.approx(lower(schedule, cost=cost).makespan, rel=1e-9)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zb_h1", 1)])
def test_an_extended_step_equals_one_simulated_whole_with_unequal_stages(
    name: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = Cost(forward=1.0, backward=2.1, input_gradient=1.2, weight_gradient=0.9, transfer=0.05)
    last = replace(each, forward=1.4, backward=2.5, input_gradient=1.6)
    costs = [each] * (4 * chunks - 1) + [last]
    whole = pipeline_time(name, 4, chunks, 64, costs)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "LEAST_SIMULATED", 0)
    assert pipeline_time(name, 4, chunks, 64, costs) == pytest.approx(whole, rel=1e-9)  # type: ignore[arg-type]


CANDIDATES = list(layouts(Query(model=MODEL, hardware=hardware(), gpus=48, seq=1024, global_batch=96)))


@given(st.sampled_from(CANDIDATES))
@settings(max_examples=60, deadline=None)
def test_a_bound_is_below_the_time_and_parts_sum_to_it(layout: PlannedLayout) -> None:
    model = CostModel(SHAPE, hardware())
    step = model.step(layout)
    assert model.bound(layout) <= step.total * (1 + 1e-9)
    assert tuple(step.parts) == PARTS
    assert sum(step.parts.values()) == pytest.approx(step.total, rel=1e-9)
    assert min(step.parts.values()) >= 0


def test_full_recomputation_takes_a_third_more_and_repeats_communication() -> None:
    model = CostModel(SHAPE, hardware())
    plain = PlannedLayout(tp=4, micro_batch=4, global_batch=16)
    once, twice = model.step(plain), model.step(replace(plain, recompute="full"))
    layer = model.layer(plain)
    assert twice.total - once.total == pytest.approx(
        4 * MODEL.num_layers * (layer.forward - layer.weights / 5)
    )


def test_communication_across_nodes_shares_their_network() -> None:
    """Eight rings of a dp axis outside tp=8 have a link each; one ring of tp=1 has all of them."""
    model, layout = CostModel(SHAPE, hardware()), PlannedLayout(tp=4, dp=32, global_batch=32)
    share = model.hardware.efficiency.network * 1e9
    assert model.link(layout, 4, 1)[0] == pytest.approx(300 * share)
    assert model.link(layout, 16, 8)[0] == pytest.approx(25 * share)
    assert model.link(layout, 16, 2)[0] == pytest.approx(100 * share)
    assert model.link(layout, 16, 1)[0] == pytest.approx(200 * share)


def test_tensor_parallel_groups_that_lie_across_nodes_have_the_slow_link() -> None:
    """Of tp=6 on nodes of 8, every other group has two GPUs on another node; alone on a node it has none."""
    model = CostModel(SHAPE, hardware())
    share = model.hardware.efficiency.network * 1e9
    rate, latency = model.link(PlannedLayout(tp=6, dp=4, global_batch=4), 6, 1)
    assert rate == pytest.approx(2 * 25 * share)
    assert latency == pytest.approx(20e-6)
    assert model.link(PlannedLayout(tp=6, global_batch=1), 6, 1)[0] == pytest.approx(300 * share)
    one_each = CostModel(SHAPE, replace(hardware(), devices_per_node=1))
    assert one_each.link(PlannedLayout(tp=2, global_batch=1), 2, 1)[0] == pytest.approx(25 * share)


def test_overlap_hides_communication_on_gpus_and_not_on_cpus() -> None:
    layout = PlannedLayout(tp=2, dp=4, micro_batch=4, global_batch=16)
    gpu = CostModel(SHAPE, hardware())
    cpu = CostModel(SHAPE, replace(hardware(), device="cpu"))
    assert cpu.layer(layout).tp_backward == pytest.approx(cpu.layer(layout).tp)
    assert gpu.layer(layout).tp_backward < gpu.layer(layout).tp
    assert gpu.step(layout).parts["dp"] < cpu.step(layout).parts["dp"]


@pytest.mark.parametrize(("zero", "reduce"), [(3, "last"), (3, "every"), (2, "last"), (2, "every")])
def test_sharded_weights_are_gathered_as_often_as_they_are_used(zero: int, reduce: str) -> None:
    """Where nothing hides it: with zero=3 twice a micro-batch, with zero=2 once a step."""
    model, m = CostModel(SHAPE, replace(hardware(), device="cpu")), 4
    layout = PlannedLayout(dp=4, zero=zero, zero_reduce=reduce, global_batch=4 * m)  # type: ignore[arg-type]
    elements = MODEL.num_layers * SHAPE.layer_weights + SHAPE.table
    gather = model.gather(layout, model.element * elements, 4, 1)
    scatter = model.gather(layout, model.software.gradient_bytes * elements, 4, 1)
    gathers, scatters = 2 * m if zero == 3 else 1, m if reduce == "every" else 1
    assert model.step(layout).parts["dp"] == pytest.approx(gathers * gather + scatters * scatter)
