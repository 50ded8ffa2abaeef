"""The time model: work is what modules do, the pipeline equals the simulator, parts sum to the whole."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.models.config import ModelConfig
from mlm.models.shape import count_parameters, layer_weights
from mlm.optim.config import OptimizerConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.pipeline.actions import Cost
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.plan import schedule as module
from mlm.plan.candidates import Query, layouts
from mlm.plan.cost import COMPUTED, PARTS, CostModel, Software
from mlm.plan.dry_run_meter import BACKWARD, FORWARD
from mlm.plan.hardware import HardwareConfig, preset
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout, hardware_flops
from mlm.plan.schedule import pipeline_time
from mlm.plan.trace import Attention, Message, Product, Waited, Work
from tests.plan.planned import LLAMA, planned_run

MODEL = ModelConfig(
    num_layers=24,
    hidden_size=2048,
    num_heads=16,
    vocab_size=51200,
    vocab_multiple=1,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
RUN = planned_run(MODEL, 1024, batch=96)


def hardware(**changes: Any) -> HardwareConfig:
    """A node of eight GPUs, with a network of 25 GB/s each."""
    return replace(preset("dgx_a100_80g"), **changes)


def cost(gpus: int = 8, software: Software | None = None, **changes: Any) -> CostModel:
    return CostModel(counts_of(RUN, "gpu"), hardware(**changes), gpus, software)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads"), [(24, 2304, 24), (128, 25600, 160), (105, 20480, 128)]
)
def test_operations_equal_equation_3_of_sc21(layers: int, hidden: int, heads: int) -> None:
    """96 B S L H^2 (1 + S/6H + V/16LH), in whole numbers."""
    batch, seq, vocab = 1536, 2048, 51200
    model = replace(MODEL, num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=vocab)
    bracket = 1 + Fraction(seq, 6 * hidden) + Fraction(vocab, 16 * layers * hidden)
    expected = 96 * batch * seq * layers * hidden**2 * bracket
    assert hardware_flops(model, seq, batch, "full") == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("cp", [1, 2])
def test_products_that_are_counted_are_the_models_operations(cp: int) -> None:
    """Of a layer on two samples, forward and backward, causal attention counted half and made again."""
    model = replace(LLAMA, hidden_size=64, options={"num_kv_heads": 4})  # heads that kernels serve
    split, tokens = ParallelConfig(tp=2, cp=cp), 2 * 32 // cp
    (_, two) = counts_of(planned_run(model), "gpu").counts(split).passes
    works = [two.work[phase, "0"] for phase in (FORWARD, BACKWARD)]
    events = [event for work in works for event in work.events]
    products = sum(2 * e.times * e.m * e.k * e.n for e in events if isinstance(e, Product))
    assert products == 6 * tokens * layer_weights(model) / 2
    attention = sum(e.flops for e in events if isinstance(e, Attention))
    pairs = tokens * 32 / 2  # half of all are masked; each rank has an equal share
    assert attention == pytest.approx(7 * 2 * pairs * 64 / 2)


@pytest.mark.parametrize("micro_batches", [8, 61])
@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("1f1b", 3), ("gpipe", 1), ("gpipe", 2), ("zb_h1", 1)]
)
def test_pipeline_time_equals_the_simulated_plan(
    name: Any, chunks: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunks > 1 and name == "1f1b" and micro_batches % 4:
        pytest.skip("interleaving takes micro-batches in groups")
    monkeypatch.setattr(module, "LEAST_SIMULATED", 0)  # long steps are extended
    each = Cost(forward=1.0, backward=2.1, input_gradient=1.2, weight_gradient=0.9, transfer=0.1)
    schedule = build_schedule(name, stages=4, chunks=chunks, micro_batches=micro_batches)
    found = pipeline_time(name, 4, chunks, micro_batches, [each] * (4 * chunks))
    assert found == pytest.approx(lower(schedule, cost=each).makespan, rel=1e-9)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zb_h1", 1)])
def test_an_extended_step_equals_one_simulated_whole_with_unequal_stages(
    name: Any, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = Cost(forward=1.0, backward=2.1, input_gradient=1.2, weight_gradient=0.9, transfer=0.05)
    last = replace(each, forward=1.4, backward=2.5, input_gradient=1.6)
    costs = [each] * (4 * chunks - 1) + [last]
    whole = pipeline_time(name, 4, chunks, 64, costs)
    monkeypatch.setattr(module, "LEAST_SIMULATED", 0)
    assert pipeline_time(name, 4, chunks, 64, costs) == pytest.approx(whole, rel=1e-9)


CANDIDATES = list(layouts(Query(run=RUN, hardware=hardware(), gpus=48)))


@given(st.sampled_from(CANDIDATES))
@settings(max_examples=20, deadline=None)
def test_a_bound_is_below_the_time_and_parts_sum_to_it(layout: PlannedLayout) -> None:
    model = cost(48)
    step = model.step(layout)
    assert model.bound(layout) <= step.total * (1 + 1e-9)
    assert tuple(step.parts) == PARTS
    assert sum(step.parts.values()) == pytest.approx(step.total, rel=1e-9)
    assert min(step.parts.values()) >= -1e-9 * step.total


def test_full_recomputation_is_another_forward_pass_of_each_layer() -> None:
    model, plain = cost(), PlannedLayout(tp=4, micro_batch=4, global_batch=16)
    once, twice = model.step(plain), model.step(replace(plain, recompute="full"))
    forward = sum(model.home_times(plain.split, plain.micro_batch)["0"].forward)
    assert twice.total - once.total == pytest.approx(4 * MODEL.num_layers * forward)
    assert twice.parts["recompute"] == pytest.approx(4 * MODEL.num_layers * forward)


@pytest.mark.parametrize(
    ("ranks", "stride", "hops_us"),
    [(2, 1, 0), (8, 1, 7 * 3.4), (4, 8, 3 * 14), (16, 4, 8 * 6 + 7 * 14), (16, 1, 14 * 6 + 14)],
)
def test_a_gather_passes_all_but_the_ranks_own_part_round_a_ring(
    ranks: int, stride: int, hops_us: float
) -> None:
    """k - 1 hops, of k ranks on n nodes n - 1 between nodes; then the others last three posts of 2 us."""
    model = cost(64)
    rate, latency = model.link(ranks, stride)
    once = latency * math.ceil(math.log2(ranks)) + (ranks - 1) / ranks * 1e9 / rate
    assert model.gather(1e9, ranks, stride) == pytest.approx(once + hops_us * 1e-6)
    assert model.all_reduce(1e9, ranks, stride) == pytest.approx(2 * once)
    assert model.gather(1e9, 1, 1) == model.gather(0.0, ranks, stride) == 0.0


@pytest.mark.parametrize(
    ("ranks", "stride", "bus_gbps"),
    [(8, 1, 300), (16, 1, 25 * 15 / 8), (64, 1, 25 * 63 / 56), (4, 8, 25), (8, 4, 25 * 7 / 6)],
)
def test_an_all_to_all_is_as_fast_as_a_devices_own_link(ranks: int, stride: int, bus_gbps: float) -> None:
    """nccl-tests, issue 130: (k - 1)/k of the bytes over the bus's bandwidth.

    Over N nodes that is the network's for a GPU, times what a rank sends over what it sends elsewhere.
    """
    model = cost(64)
    latency = 10e-6 if ranks * stride <= 8 else 20e-6
    rate = bus_gbps * 1e9 * model.hardware.efficiency.network
    expected = latency + (ranks - 1) / ranks * 1e9 / rate
    assert model.all_to_all(1e9, ranks, stride) == pytest.approx(expected)
    work = Work(events=[Message("ep", "all-to-all", ranks, 10**9, 1), Waited(1)])
    seconds = model.price(work, ParallelConfig(tp=stride, ep=ranks), fused=True)
    assert seconds[COMPUTED.index("ep")] == pytest.approx(expected)
    assert model.all_to_all(1e9, 1, 1) == model.all_to_all(0.0, ranks, stride) == 0.0


def test_sharded_layers_wait_for_a_ring_of_all_ranks_each() -> None:
    """The same bytes for each of the ranks: 8 times the nodes, 8 times the hops, of 24 layers three times."""

    def seconds(gpus: int) -> float:
        layout = PlannedLayout(dp=gpus, zero=3, global_batch=gpus)
        return cost(gpus, Software(overlaps_dp=False)).step(layout).parts["dp"]

    more = seconds(1024) - seconds(128)
    hops = (1024 - 128 - 112) * 6e-6 + 112 * 14e-6
    assert more == pytest.approx(3 * 24 * (hops + 3 * 20e-6), rel=0.05)


def test_communication_across_nodes_shares_their_network() -> None:
    """Eight rings of a dp axis outside tp=8 have a link each; one ring of tp=1 has all of them."""
    model, one_each = cost(128), cost(2, devices_per_node=1)
    share = model.hardware.efficiency.network * 1e9
    assert model.link(4, 1)[0] == pytest.approx(300 * share)
    assert model.link(16, 8)[0] == pytest.approx(25 * share)
    assert model.link(16, 2)[0] == pytest.approx(100 * share)
    assert model.link(16, 1)[0] == pytest.approx(200 * share)
    assert cost(24).link(6, 1)[0] == pytest.approx(50 * share)  # every other tp=6 lies across two nodes
    assert cost(6).link(6, 1)[0] == pytest.approx(300 * share)
    assert one_each.link(2, 1)[0] == pytest.approx(25 * share)


def test_what_is_computed_between_start_and_wait_hides_a_message() -> None:
    """Two that are alike, one waited for at once; a program that does not overlap waits for both."""
    product, size = Product(1, 4096, 4096, 4096, 3 * 2 * 4096**2, 2), 1 << 28
    events = [
        *(Message("tp", "all-reduce", 8, size, 1), Waited(1)),
        *(Message("tp", "all-reduce", 8, size, 2), product, Waited(2)),
    ]
    model, work = cost(), Work(events=events)
    length, took = model.all_reduce(size, 8, 1), model.product(product)
    assert took < length
    seconds = model.price(work, ParallelConfig(tp=8), fused=True)
    assert seconds[0] == pytest.approx(took)
    assert seconds[3] == pytest.approx(2 * length - took)
    waits = cost(software=Software(overlaps=False)).price(work, ParallelConfig(tp=8), fused=True)
    assert waits[3] == pytest.approx(2 * length)


def test_a_layers_gradient_sums_are_hidden_and_its_results_are_not() -> None:
    """The program's order: two all-reduces each way (arXiv:1909.08053), those backward beside products."""
    (one, _) = counts_of(RUN, "gpu").counts(ParallelConfig(tp=2)).passes
    for phase, between in ((FORWARD, 0), (BACKWARD, 1)):
        events = one.work[phase, "0"].events
        starts = [n for n, event in enumerate(events) if isinstance(event, Message)]
        waits = [n for n, event in enumerate(events) if isinstance(event, Waited)]
        assert len(starts) == len(waits) == 2
        for start, wait in zip(starts, waits, strict=True):
            assert sum(isinstance(e, Product) for e in events[start:wait]) == between


def test_the_last_message_is_never_hidden() -> None:
    exposed = cost(multiprocessors=None).exposed_time
    assert exposed(10.0, 4.0, 5) == 6.0
    assert exposed(10.0, 9.5, 5) == exposed(10.0, 100.0, 5) == 2.0
    assert exposed(10.0, 0.0, 5) == 10.0
    assert exposed(10.0, 100.0) == 0.0


@pytest.mark.parametrize("window", [1.0, 8.0, 9.0, 20.0])
def test_messages_slow_what_hides_them(window: float) -> None:
    """16 of an A100's 108 multiprocessors pass messages: the rest computes 92/108 as fast until they end."""
    slowed = min(10.0, window * 108 / 92)  # while both run
    elapsed = max(10.0, slowed + window - slowed * 92 / 108)
    assert cost().exposed_time(10.0, window) == pytest.approx(elapsed - window)


def test_interleaved_chunks_hide_messages_of_others_for_p_micro_batches() -> None:
    """A chunk's gradients are complete before p micro-batches of each chunk that is before it."""
    model = cost(16, devices_per_node=1, network_gbps=0.1)
    plain, interleaved = (PlannedLayout(pp=4, vp=vp, dp=4, global_batch=32) for vp in (1, 3))
    backward = sum(stage.backward for stage in model.stage_costs(interleaved)[::4])
    less = model.step(plain).parts["dp"] - model.step(interleaved).parts["dp"]
    assert less == pytest.approx((4 - 1) * backward)


@pytest.mark.parametrize(("zero", "reduce"), [(3, "last"), (3, "every"), (2, "last"), (2, "every")])
def test_sharded_weights_are_gathered_as_often_as_they_are_used(zero: Any, reduce: Any) -> None:
    """Where nothing hides it: with zero=3 twice a micro-batch, with zero=2 once a step; layer by layer."""
    model, m = cost(software=Software(overlaps_dp=False)), 4
    layout = PlannedLayout(dp=4, zero=zero, zero_reduce=reduce, global_batch=4 * m)
    layers, elements = MODEL.num_layers, count_parameters(MODEL) / MODEL.num_layers
    gather, scatter = (layers * model.gather(size * elements, 4, 1) for size in (2, 4))
    gathers, scatters = 2 * m if zero == 3 else 1, m if reduce == "every" else 1
    assert model.step(layout).parts["dp"] == pytest.approx(gathers * gather + scatters * scatter)


def test_a_program_may_all_reduce_what_a_sharded_optimizer_takes_a_part_of() -> None:
    model = cost(software=Software(overlaps_dp=False, reduces_whole=True))
    layers, elements = MODEL.num_layers, count_parameters(MODEL) / MODEL.num_layers
    expected = layers * (model.gather(2 * elements, 4, 1) + model.all_reduce(4 * elements, 4, 1))
    step = model.step(PlannedLayout(dp=4, zero=2, global_batch=16))
    assert step.parts["dp"] == pytest.approx(expected)


def test_replicas_divide_the_products_of_muon_and_send_their_results() -> None:
    """Five iterations of 60 H^3 operations on a layer; messages in bf16, with ZeRO of rows there and back."""
    run = replace(RUN, optimizer=OptimizerConfig(kind="muon"))

    def seconds(dp: int, zero: int = 0, gbps: float = 1e9) -> float:
        model = CostModel(counts_of(run, "gpu"), hardware(node_gbps=gbps, node_latency_us=0.0), 8)
        layout = PlannedLayout(dp=dp, zero=zero, global_batch=4)  # type: ignore[arg-type]
        return model.step(layout).parts["optimizer"]

    products = 2 * (seconds(1) - seconds(2))
    assert products > 24 * 5 * 60 * MODEL.hidden_size**3 / 312e12
    hops = 24 * 3 * 3.4e-6  # of a message for each layer
    assert seconds(2) - seconds(4) == pytest.approx(products / 4 - hops)
    rate = 300e9 * hardware().efficiency.network
    sent = 2 * 24 * 12 * MODEL.hidden_size**2 * 3 / 4 / rate
    assert seconds(4, 0, 300) - seconds(4, 0) == pytest.approx(sent, rel=0.01)
    assert seconds(4, 2, 300) - seconds(4, 2) == pytest.approx(sent / 2, rel=0.01)
