"""Terms of a step's time, each against its equation."""

from dataclasses import replace

import pytest

from mlm.models.config import ModelConfig
from mlm.plan.cost import LOGIT_BYTES, CostModel, exposed
from mlm.plan.hardware import HardwareConfig, preset
from mlm.plan.shape import PlannedLayout, Shape

MODEL = ModelConfig(num_layers=24, hidden_size=2048, num_heads=16, vocab_size=51200, vocab_multiple=1)
SHAPE = Shape(MODEL, 1024)
UNTIED = Shape(replace(MODEL, kind="llama", ffn_hidden_size=6144), 1024)
"""A Llama, whose output layer is a table of its own."""
TABLE = SHAPE.table


def hardware(**changes: object) -> HardwareConfig:
    return replace(preset("dgx_a100_80g"), **changes)  # type: ignore[arg-type]


def plain(shape: Shape = SHAPE) -> CostModel:
    """Where nothing overlaps."""
    return CostModel(shape, hardware(device="cpu"))


def test_the_last_message_is_never_hidden() -> None:
    assert exposed(10.0, 4.0, 5) == 6.0
    assert exposed(10.0, 9.5, 5) == exposed(10.0, 100.0, 5) == 2.0
    assert exposed(10.0, 0.0, 5) == 10.0


@pytest.mark.parametrize(("ranks", "hops"), [(2, 1), (3, 2), (4, 2), (8, 3)])
def test_a_gather_passes_all_but_the_ranks_own_part_in_log2_hops(ranks: int, hops: int) -> None:
    model, layout = CostModel(SHAPE, hardware()), PlannedLayout(tp=ranks)
    rate = 300e9 * model.hardware.efficiency.network
    assert model.gather(layout, 1e9, ranks, 1) == pytest.approx(
        hops * 10e-6 + (ranks - 1) / ranks * 1e9 / rate
    )
    assert model.gather(layout, 1e9, 1, 1) == 0.0


def test_sequence_parallelism_gathers_the_inputs_again_in_backward() -> None:
    """Two of a layer's products, where no product hides it."""
    model, layout = plain(), PlannedLayout(tp=4)
    again = model.gather(layout, model.element * SHAPE.seq * MODEL.hidden_size, 4, 1)
    split = model.layer(replace(layout, sequence_parallel=True))
    assert split.tp_backward - model.layer(layout).tp_backward == pytest.approx(2 * again)
    assert split.tp == model.layer(layout).tp


def test_one_model_answers_for_weights_that_are_sharded_and_that_are_not() -> None:
    """Gathered weights arrive cast, with other bytes, in layouts that are equal in all else."""
    model, layout = CostModel(SHAPE, hardware()), PlannedLayout(dp=4, global_batch=4)
    whole, sharded = model.layer(layout), model.layer(replace(layout, zero=2))
    bytes_of = model.software
    assert sharded.weights / whole.weights == pytest.approx(
        bytes_of.gathered_weight_bytes / bytes_of.weight_bytes
    )
    assert bytes_of.gathered_weight_bytes != bytes_of.weight_bytes


def test_ranks_of_a_split_sequence_send_their_part_of_a_boundary() -> None:
    model, layout = CostModel(SHAPE, hardware()), PlannedLayout(tp=4, pp=2)
    latency, size = 10e-6, model.element * SHAPE.seq * MODEL.hidden_size
    rate = 300e9 * model.hardware.efficiency.network
    assert model._transfer(layout) == pytest.approx(latency + size / rate)
    assert model._transfer(replace(layout, sequence_parallel=True)) == pytest.approx(
        latency + size / 4 / rate
    )


def test_attention_to_all_tokens_takes_twice_as_long_as_to_those_before() -> None:
    model = CostModel(replace(SHAPE, seq=8192), hardware())
    both = CostModel(Shape(replace(MODEL, kind="bert"), 8192), hardware())
    for part in ("attention", "attention_backward"):
        assert getattr(both.layer(PlannedLayout()), part) == pytest.approx(
            2 * getattr(model.layer(PlannedLayout()), part)
        )


def test_both_ends_of_a_pipeline_make_the_gradient_of_their_table() -> None:
    model, layout = plain(), PlannedLayout(pp=4)
    stages = model._stages(layout)
    table = model.traffic(model.software.table_bytes * TABLE)
    assert table > 0
    extra = [stage.backward - stages[1].backward for stage in stages]
    embedding = stages[0].forward - stages[1].forward
    assert extra == pytest.approx([table + embedding, 0.0, 0.0, table + model.head(layout)[1]])


def test_fp8_speeds_up_the_layers_products_and_not_the_vocabularys() -> None:
    h100, layout = preset("dgx_h100"), PlannedLayout()
    fp8, bf16 = CostModel(SHAPE, h100, "fp8"), CostModel(SHAPE, h100, "bf16")
    assert fp8.peak == bf16.peak
    assert fp8.head(layout) == bf16.head(layout)


def test_tokens_that_are_not_scored_pass_no_vocabulary_projection() -> None:
    """Those that BERT masks cost what a sequence of so many does."""
    masked = round(0.15 * SHAPE.seq)
    some = CostModel(Shape(replace(MODEL, kind="bert"), SHAPE.seq), hardware())
    short = CostModel(replace(SHAPE, seq=masked), hardware())
    assert some.head(PlannedLayout()) == pytest.approx(short.head(PlannedLayout()))
    assert LOGIT_BYTES * masked * SHAPE.vocab / some.bandwidth < some.head(PlannedLayout())[0]


def test_sharded_optimizers_update_their_rows_alone() -> None:
    model, layout = CostModel(SHAPE, hardware()), PlannedLayout(dp=4, global_batch=4)
    whole = model.step(layout).parts["optimizer"]
    assert whole == pytest.approx(model.optimizer(MODEL.num_layers * SHAPE.layer_weights + TABLE))
    for zero in (2, 3):
        sharded = model.step(replace(layout, zero=zero)).parts["optimizer"]  # type: ignore[arg-type]
        assert sharded == pytest.approx(whole / 4)


def test_a_table_of_two_stages_is_summed_over_them_if_it_is_tied() -> None:
    layout = PlannedLayout(pp=2, tp=2)
    tied = plain()
    rate, latency = tied.link(layout, 2, 2)
    assert tied.step(layout).parts["dp"] == pytest.approx(
        latency + tied.software.tied_bytes * TABLE / 2 / rate
    )
    assert plain(UNTIED).step(layout).parts["dp"] == 0.0


def test_an_output_layer_of_its_own_is_a_second_table_of_the_one_stage() -> None:
    model = plain(UNTIED)
    elements = MODEL.num_layers * UNTIED.layer_weights + 2 * TABLE
    assert model.step(PlannedLayout()).parts["optimizer"] == pytest.approx(model.optimizer(elements))


def test_a_zero_bubble_schedule_reduces_when_all_is_computed() -> None:
    """Weight gradients come last, so that no backward pass hides their sum."""
    model = CostModel(UNTIED, hardware())
    layout = PlannedLayout(pp=2, dp=2, global_batch=16, pipeline="zb_h1")
    weights = 12 * UNTIED.layer_weights + TABLE
    whole = model.all_reduce(layout, model.software.gradient_bytes * weights, 2, 1)
    assert model.step(layout).parts["dp"] == pytest.approx(whole)
    assert model.step(replace(layout, pipeline="1f1b")).parts["dp"] == pytest.approx(whole / 12)
