"""The memory model: exact for what a rank holds, and what layers keep for backward as they keep it."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlm.models.config import ModelConfig
from mlm.models.llama.model import LlamaLayer
from mlm.models.rotary import Rotary
from mlm.models.transformer import TransformerLayer
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.gradients import build_reducer
from mlm.parallel.mesh import Axis, ParallelContext, shape_context
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.parallel.sharding import parameter_shards
from mlm.plan.memory import MemoryModel, StepMemory, in_flight
from mlm.plan.shape import PlannedLayout
from mlm.training.pipelined import PipelinedModel
from tests.ranks import run_on_ranks

GPT2 = ModelConfig(num_layers=7, hidden_size=48, num_heads=4, max_positions=32, vocab_size=1000)
BERT = ModelConfig(
    kind="bert", num_layers=4, hidden_size=48, num_heads=4, max_positions=32, vocab_size=1000, token_types=2
)
POST = ModelConfig(
    kind="bert", num_layers=4, hidden_size=32, num_heads=2, max_positions=16, token_types=2, norm="post"
)
LLAMA = ModelConfig(
    kind="llama",
    num_layers=4,
    hidden_size=48,
    num_heads=4,
    ffn_hidden_size=40,
    max_positions=32,
    activation="silu",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    options={"num_kv_heads": 1},
)
QWEN = replace(
    LLAMA, options={"num_kv_heads": 2, "head_dim": 16, "qk_norm": True, "qkv_bias": True, "tied": True}
)


@pytest.mark.parametrize(
    "model", [GPT2, BERT, POST, LLAMA, QWEN], ids=["gpt2", "bert", "bert-post", "llama", "qwen"]
)
@pytest.mark.parametrize(("tp", "pp", "vp"), [(1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 2, 2), (1, 4, 1)])
def test_every_rank_holds_the_parameters_that_are_predicted(
    model: ModelConfig, tp: int, pp: int, vp: int
) -> None:
    if pp * vp > model.num_layers or (vp > 1 and model.num_layers % (pp * vp)):
        pytest.skip("no such layout")
    memory = MemoryModel(model, model.max_positions)
    parallel = ParallelConfig(tp=tp, pp=pp, vp=vp)
    for stage in range(pp):
        with torch.device("meta"):
            ctx = shape_context(stage * tp, tp=tp, pp=pp)
            built = PipelinedModel(model, parallel, PrecisionConfig(), meta(ctx))
        held = memory.held(PlannedLayout(tp=tp, pp=pp, vp=vp), stage)
        tensors = [p for chunk in built.chunks for p in chunk.parameters()]
        assert held.parameters == held.whole == sum(p.numel() for p in tensors)
        assert held.tensors == len(tensors)


def meta(ctx: ParallelContext) -> ParallelContext:
    """The context on the device that holds shapes only."""
    return replace(ctx, device=torch.device("meta"))


def held_when_sharded(ctx: ParallelContext, model: ModelConfig, zero: int) -> tuple[int, int, int]:
    """Elements that a rank's optimizer works on; of them gradients and moments."""
    parallel = ParallelConfig(dp=ctx.dp.size, zero=zero)  # type: ignore[arg-type]
    (chunk,) = PipelinedModel(model, parallel, PrecisionConfig(dtype="fp32"), ctx).chunks
    units = chunk.layers.values()
    build_reducer(chunk, ctx.dp, zero=zero, compute_dtype=torch.float32, units=units)
    shards = list(parameter_shards(chunk, ctx.tp))
    return sum(s.parameter.numel() for s in shards), len(shards), ctx.dp.rank


@pytest.mark.parametrize("zero", [2, 3])
def test_sharded_ranks_hold_the_rows_that_are_predicted(zero: int) -> None:
    """With rows that three ranks do not divide."""
    memory = MemoryModel(GPT2, 32)
    for parameters, tensors, rank in run_on_ranks(held_when_sharded, GPT2, zero, dp=3):
        held = memory.held(PlannedLayout(dp=3, zero=zero), 0, rank)  # type: ignore[arg-type]
        assert (held.parameters, held.tensors) == (parameters, tensors)


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [*product(["1f1b", "zb_h1", "gpipe"], [1, 4], [1], [2, 8]), ("1f1b", 4, 3, 8), ("gpipe", 4, 2, 8)],
)
def test_pairs_in_flight_are_those_of_the_schedule(name: str, p: int, v: int, m: int) -> None:
    plan = lower(build_schedule(name, stages=p, chunks=v, micro_batches=m))
    layout = PlannedLayout(pp=p, vp=v, pipeline=name, micro_batch=1, global_batch=m)  # type: ignore[arg-type]
    assert [in_flight(layout, rank) for rank in range(p)] == list(plan.peak_in_flight)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu2"])
def test_a_layer_keeps_the_activations_that_are_predicted(
    tp: int, sequence_parallel: bool, dtype: torch.dtype, name: str, activation: Any
) -> None:
    """Bytes of all that autograd saves in a real layer, parameters and their casts left out."""
    model = ModelConfig(
        num_layers=1,
        hidden_size=256,
        num_heads=8,
        max_positions=128,
        attention_dropout=0.0,
        hidden_dropout=0.1,
        activation=activation,
    )
    layout = PlannedLayout(
        tp=tp, sequence_parallel=sequence_parallel and tp > 1, micro_batch=2, global_batch=2
    )
    memory = MemoryModel(model, 128, name)
    predicted = StepMemory(memory, layout, 0, memory.held(layout, 0))._kept
    layer = TransformerLayer(model, layer=0, tp=Axis("tp", 0, tp))
    found = saved_bytes(layer, torch.randn(128, 2, 256, dtype=dtype, requires_grad=True))
    if layout.sequence_parallel:  # no group to scatter over: the share of what is split is known
        h, rows, e = 256, 256, memory.element
        split = rows * (4 * e * h + 2 * h + 16)
        found -= split - split / tp
    assert predicted == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("options", [LLAMA.options, QWEN.options], ids=["llama", "qwen"])
@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
def test_a_llama_layer_keeps_the_activations_that_are_predicted(
    tp: int, options: dict[str, bool | int | float | str], dtype: torch.dtype, name: str
) -> None:
    """Grouped queries without repeated keys, a gate, norms of heads."""
    model = replace(LLAMA, num_layers=1, hidden_size=256, ffn_hidden_size=704, options=options)
    layout = PlannedLayout(tp=tp, micro_batch=2, global_batch=2)
    memory = MemoryModel(model, 128, name)
    predicted = StepMemory(memory, layout, 0, memory.held(layout, 0))._kept
    layer = LlamaLayer(model, layer=0, tp=Axis("tp", 0, tp))
    x = torch.randn(128, 2, 256, dtype=dtype, requires_grad=True)
    width = model.head_dim // 2
    rotary = Rotary(torch.ones(128, 1, 1, width, dtype=dtype), torch.ones(128, 1, 1, width, dtype=dtype))
    tables = sum(table.untyped_storage().nbytes() for table in (rotary.cos, rotary.sin))
    found = saved_bytes(layer, x, rotary=rotary) - tables  # all layers share them
    assert predicted == pytest.approx(found, rel=0.01)


def saved_bytes(layer: nn.Module, x: Tensor, **inputs: Rotary) -> int:
    """Bytes of the storages that a layer's graph keeps, each once, without parameters and vectors."""
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        if saved.dim() > 1 and saved.untyped_storage().data_ptr() not in weights:
            kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = layer(x, DropoutStream.of_micro_batch(0, 0, x.shape[1], torch.device("cpu")), **inputs)
    found = sum(saved.untyped_storage().nbytes() for saved in kept.values())
    del y
    return found


def test_both_ends_of_a_pipeline_exchange_the_gradient_of_a_tied_table() -> None:
    """In float32, as large as the tensor-parallel part of the table; no other stage, nor an untied model."""
    layout = PlannedLayout(tp=2, pp=3, global_batch=4)
    for model, sizes in ((GPT2, [True, False, True]), (LLAMA, [False] * 3)):
        memory, table = MemoryModel(model, 32), 4 * model.padded_vocab_size(2) // 2 * 48
        found = [
            StepMemory(memory, layout, rank, memory.held(layout, rank)).optimizer_steps() for rank in range(3)
        ]
        assert [parts["communication"] for parts in found] == [table * size for size in sizes]
