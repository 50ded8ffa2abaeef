"""The memory model: exact for what a rank holds, and for the rest what whole dry runs count."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlm.cli.compose.composition import load_config
from mlm.models.config import ModelConfig
from mlm.models.transformer import TransformerLayer
from mlm.optim.config import PrecisionConfig
from mlm.parallel import matmul
from mlm.parallel.compute_state import prepare_to_compile
from mlm.parallel.config import ParallelConfig
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.gradients import build_reducer
from mlm.parallel.mesh import Axis, ParallelContext, shape_context
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.parallel.sharding import parameter_shards
from mlm.plan.config import PlanDryRunConfig
from mlm.plan.dry_run_memory import STATE, WEIGHTS
from mlm.plan.dry_run_rank import dry_run
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import MemoryModel, in_flight
from mlm.training.kernels import keep_activations
from mlm.training.pipelined import PipelinedModel
from tests.models.tiny import tiny
from tests.plan.planned import GPT2, LLAMA, memory_of, planned_run
from tests.ranks import run_on_ranks
from tests.slow import slow, slow_but

BERT = tiny("bert", num_layers=4, hidden_size=48, max_positions=32, vocab_size=1000)
POST = replace(BERT, norm="post")
QWEN = replace(
    LLAMA, options={"num_kv_heads": 2, "head_dim": 16, "qk_norm": True, "qkv_bias": True, "tied": True}
)


@pytest.mark.parametrize("model", [GPT2, POST, QWEN], ids=["gpt2", "bert-post", "qwen"])
@pytest.mark.parametrize(("tp", "pp", "vp"), [(1, 3, 1), (2, 2, 2)])
def test_every_rank_holds_the_parameters_that_are_predicted(
    model: ModelConfig, tp: int, pp: int, vp: int
) -> None:
    if pp * vp > model.num_layers or (vp > 1 and model.num_layers % (pp * vp)):
        pytest.skip("no such layout")
    memory, parallel = memory_of(model), ParallelConfig(tp=tp, pp=pp, vp=vp)
    for stage in range(pp):
        with torch.device("meta"):
            ctx = shape_context(stage * tp, tp=tp, pp=pp)
            on_meta = replace(ctx, device=torch.device("meta"))
            built = PipelinedModel(model, parallel, PrecisionConfig(), on_meta)
        state = memory.state(PlannedLayout(tp=tp, pp=pp, vp=vp), stage)
        assert state.parameters == sum(p.numel() for chunk in built.chunks for p in chunk.parameters())


def held_when_sharded(ctx: ParallelContext, model: ModelConfig, zero: int) -> tuple[int, int]:
    """Elements that a rank's optimizer works on; of them gradients and moments."""
    parallel = ParallelConfig(dp=ctx.dp.size, zero=zero)  # type: ignore[arg-type]
    (chunk,) = PipelinedModel(model, parallel, PrecisionConfig(dtype="fp32"), ctx).chunks
    units = chunk.layers.values()
    build_reducer(chunk, ctx.dp, zero=zero, compute_dtype=torch.float32, units=units)
    return sum(s.parameter.numel() for s in parameter_shards(chunk, ctx.tp)), ctx.dp.rank


def test_sharded_ranks_hold_the_rows_that_are_predicted() -> None:
    """With rows that three ranks do not divide."""
    memory = memory_of(GPT2)
    for parameters, rank in run_on_ranks(held_when_sharded, GPT2, 3, dp=3):
        assert memory.state(PlannedLayout(dp=3, zero=3), 0, rank).parameters == parameters


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [*product(["1f1b", "zb_h1", "gpipe"], [4], [1], [2, 8]), ("1f1b", 4, 3, 8), ("gpipe", 4, 2, 8)],
)
def test_pairs_in_flight_are_those_of_the_schedule(name: str, p: int, v: int, m: int) -> None:
    plan = lower(build_schedule(name, stages=p, chunks=v, micro_batches=m))
    layout = PlannedLayout(pp=p, vp=v, pipeline=name, micro_batch=1, global_batch=m)  # type: ignore[arg-type]
    assert [in_flight(layout, rank) for rank in range(p)] == list(plan.peak_in_flight)


@pytest.mark.parametrize(("tp", "dtype"), [(1, "bf16"), (4, "fp32")])
def test_a_layer_keeps_what_autograd_saves(tp: int, dtype: Any) -> None:
    """Bytes of all that a real layer's graph keeps, parameters and their casts left out."""
    model = replace(GPT2, num_layers=1, hidden_size=256, num_heads=8, max_positions=128, hidden_dropout=0.1)
    _, two = counts_of(planned_run(model, dtype=dtype), "gpu").counts(ParallelConfig(tp=tp)).passes
    layer = TransformerLayer(model, layer=0, tp=Axis("tp", 0, tp))
    x = torch.randn(128, 2, 256, dtype=getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype]))
    stream = DropoutStream.of_micro_batch(0, 0, 2, torch.device("cpu"))
    found, _ = saved_bytes(layer, x.requires_grad_(), stream)
    assert two.saved_bytes["0"] == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("budget", [slow(0.8), 0.4])
def test_a_compiled_layer_keeps_about_its_budget(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's partitioner keeps a tensor whole or not at all; and the gradients do not change."""
    # a GPU's: an opaque product is first to be recomputed
    monkeypatch.setattr(matmul, "_PREFER_ONEDNN", False)
    model = replace(GPT2, num_layers=1, hidden_size=256, num_heads=8, max_positions=128)
    split = ParallelConfig(recompute="budget", recompute_budget=budget)
    expected = counts_of(planned_run(model, dtype="fp32"), "gpu").counts(split).passes[1].saved_bytes["0"]
    torch.manual_seed(0)
    layer = TransformerLayer(model, layer=0, tp=Axis("tp"))
    for p in layer.parameters():
        nn.init.normal_(p, std=0.05)
    x, dy = torch.randn(128, 2, 256, requires_grad=True), torch.randn(128, 2, 256)
    leaves = [x, *layer.parameters()]
    plain = torch.autograd.grad(layer(x, None), leaves, dy)
    prepare_to_compile()
    keep_activations(budget)
    try:
        layer.compile(backend="aot_eager_decomp_partition")
        found, y = saved_bytes(layer, x, None)
    finally:
        keep_activations(1.0)
    assert 0.7 * expected < found < 1.1 * expected
    for gradient, of_plain in zip(torch.autograd.grad(y, leaves, dy), plain, strict=True):
        torch.testing.assert_close(gradient, of_plain, rtol=1e-4, atol=1e-5 * of_plain.abs().max().item())


def saved_bytes(layer: nn.Module, x: Tensor, stream: DropoutStream | None) -> tuple[int, Tensor]:
    """Bytes of the storages that a layer's graph keeps, without parameters and vectors; its output."""
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        if saved.dim() > 1 and saved.untyped_storage().data_ptr() not in weights:
            kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = layer(x, stream)
    return sum(saved.untyped_storage().nbytes() for saved in kept.values()), y


COMMON = (
    "model.vocab_multiple=16",
    "train.global_batch_size=16",
    "train.micro_batch_size=2",
)
DRY_RUNS = (
    "model=gpt2_tiny pp=2 vp=2 model.num_layers=4",
    "model=llama_tiny cp=2 tp=2 sequence_parallel=true pp=2",
    "model=gpt2_tiny optimizer.kind=muon",
    "model=gpt2_tiny tp=2 dp=2 zero=2 ema.decay=0.9",
    "model=llama_tiny lora.rank=4 dp=2",
    "model=moe_tiny dp=4 ep=2 zero=2",
    "model=moe_tiny dp=2 ep=2 model.num_layers=3 model.options.dense_layers=1 model.options.shared_experts=1",
    "model=gpt2_tiny model.hidden_size=256 model.num_layers=4 precision=fp8 tp=2",
)


@cache
def planned(words: str) -> tuple[PlanDryRunConfig, MemoryModel, PlannedLayout]:
    config = load_config("plan_dry_run", ["precision=bf16", *words.split(), *COMMON])
    layout = PlannedLayout.of(config, config.parallel.dp or 1)
    return config, MemoryModel(counts_of(config, "gpu")), layout


@pytest.mark.parametrize("words", slow_but({0, 6}, DRY_RUNS))
def test_memory_is_what_a_dry_run_of_the_whole_rank_counts(words: str) -> None:
    """Parameters and state exactly; all of the peak within a twentieth, of a model whose layers are small."""
    config, memory, layout = planned(words)
    for stage in {0, layout.pp - 1}:
        found = dry_run(config, stage * layout.gpus // layout.pp)
        predicted, peak = memory.peak(layout, stage), found.log.peak()
        assert predicted.parameters == found.parameters
        assert predicted.parts["weights"] == peak.parts[WEIGHTS]
        assert predicted.parts["optimizer"] == pytest.approx(peak.parts[STATE], abs=4096)  # counts of steps
        assert predicted.total - predicted.parts["allocator"] == pytest.approx(peak.bytes, rel=0.05)


def test_both_ends_of_a_pipeline_exchange_the_gradient_of_a_tied_table() -> None:
    """In float32, as large as the tensor-parallel part of the table; no other stage, nor an untied model."""
    layout = PlannedLayout(tp=2, pp=3, global_batch=4)
    for model, sizes in ((GPT2, [True, False, True]), (LLAMA, [False] * 3)):
        memory, table = memory_of(model), 4 * model.padded_vocab_size(2) // 2 * 48
        found = [memory.optimizer_steps(layout, rank, memory.state(layout, rank)) for rank in range(3)]
        assert [parts["communication"] for parts in found] == [table * size for size in sizes]


def test_layers_that_are_alike_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built, build = [], TransformerLayer.__init__

    def count(self: TransformerLayer, *args: Any, **kwargs: Any) -> None:
        built.append(self)
        build(self, *args, **kwargs)

    monkeypatch.setattr(TransformerLayer, "__init__", count)
    peak = memory_of(replace(GPT2, num_layers=2000)).peak(PlannedLayout(global_batch=4))
    assert peak.parameters > 2000 * 12 * 48**2
    assert len(built) < 20
