"""Sums of gradients over micro-batches and replicas: in which kernel, when, and of the loss's token table."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.data.sampler import Batch, MicroBatch
from mlm.parallel import cross_entropy, gradients, linear
from mlm.parallel.compute_state import ComputeState
from mlm.parallel.config import ParallelConfig
from mlm.parallel.cross_entropy import linear_cross_entropy
from mlm.parallel.gradients import fuse_embedding_grad
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.plan.dry_run_rank import META, batches_of, dry_run
from mlm.runs.config import PretrainConfig
from mlm.training import trainer as of_trainer
from mlm.training.trainer import Trainer
from tests.models.tiny import tiny
from tests.operators import Operators
from tests.plan.test_dry_run import config_of
from tests.ranks import run_on_ranks
from tests.training.test_trainer import SEQ, VOCAB, config

MICRO_BATCHES = 4
SPEC = config(global_batch_size=2 * MICRO_BATCHES, micro_batch_size=2)


def batches(rank: int, ranks: int) -> list[Batch]:
    """This replica's micro-batches of a step, the same samples at any number of replicas."""
    rows = torch.randint(0, VOCAB, (2 * MICRO_BATCHES, SEQ + 1), generator=torch.Generator().manual_seed(0))
    mine = rows.chunk(MICRO_BATCHES)[rank::ranks]
    return [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous(), 0) for x in mine]


def gradients_of(ctx: ParallelContext, spec: PretrainConfig) -> tuple[dict[str, Tensor], list[str]]:
    """Gradients after the second of two equal passes, and the sums that products joined by layer."""
    trainer: Trainer[Batch] = Trainer(spec, ctx)
    seen: list[str] = []
    original = linear.add_weight_gradient

    def counted(total: Tensor, dy: Tensor, x: Tensor) -> None:
        seen.append(str(tuple(total.shape)))
        original(total, dy, x)

    linear.add_weight_gradient = counted  # type: ignore[assignment]
    try:
        for _ in range(2):
            trainer.compute_gradients(batches(ctx.dp.rank, ctx.dp.size))
    finally:
        linear.add_weight_gradient = original
    layers = [layer for gradients in trainer.gradients for layer in gradients.fused_layers]
    assert all(layer.compute.fused_grad is None for layer in layers)
    return {s.name: s.parameter.grad.clone() for s in trainer.shards if s.parameter.grad is not None}, seen


LAYOUTS: dict[str, tuple[dict[str, int], ParallelConfig, tuple[int, ...]]] = {
    # sizes, layout, and for each rank how many of its micro-batches join a sum: the first of a step finds
    # none where gradients begin as None, nor the second where its forward pass comes before that gradient
    "one rank": ({}, ParallelConfig(), (3,)),
    "tp=2, rows split": ({"tp": 2}, ParallelConfig(tp=2, sequence_parallel=True), (3, 3)),
    "pp=2": ({"pp": 2}, ParallelConfig(pp=2), (2, 3)),
    # here the last one's wait for a reduction, which autograd announces
    "zero bubble, dp=2": ({"dp": 2}, ParallelConfig(dp=2, pipeline="zb_h1"), (1, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_inside_products_are_those_after_them(name: str) -> None:
    """In float64 they differ by the order of sums alone."""
    sizes, layout, joined = LAYOUTS[name]
    spec = replace(SPEC, parallel=layout)
    after = run_on_ranks(gradients_of, spec, **sizes)
    inside = run_on_ranks(gradients_of, replace(spec, fuse_accumulation=True), **sizes)
    for (expected, none), (found, seen), number in zip(after, inside, joined, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        layers = 4 * spec.model.num_layers // layout.pp
        assert (len(none), len(seen)) == (0, 2 * number * layers)


def test_sums_inside_products_of_half_precision_stay_float32() -> None:
    """On a CPU, which has no such product, bit for bit what autograd adds."""
    spec = replace(config(dtype="bf16"), train=SPEC.train)
    (after, _), (inside, seen) = (
        gradients_of(ParallelContext(), replace(spec, fuse_accumulation=on)) for on in (False, True)
    )
    assert seen
    assert {grad.dtype for grad in inside.values()} == {torch.float32}
    assert all(torch.equal(inside[name], grad) for name, grad in after.items())


@pytest.mark.slow
def test_a_compiled_layer_adds_where_the_sum_is() -> None:
    """As a compiler traces it, whose own operators would write a new sum."""
    layers = [linear.linear, torch.compile(linear.linear, backend="aot_eager", fullgraph=True)]
    results = []
    for apply in layers:
        torch.manual_seed(0)
        x, weight = torch.randn(6, 4), torch.randn(8, 4, requires_grad=True)
        total = torch.randn(8, 4)
        apply(x, weight, compute=ComputeState(fused_grad=total)).square().sum().backward()
        assert weight.grad is None
        results.append(total)
    torch.testing.assert_close(*results)


def test_reductions_begin_before_the_last_weight_gradient_that_was_put_off() -> None:
    """zb_h1: most buckets of weights do, and none in earlier micro-batches."""
    for events, sums, expected in run_on_ranks(order_of_events, dp=2):
        weights = [i for i, event in enumerate(events) if event == "weight"]
        reduced = [i for i, event in enumerate(events) if event == "reduce"]
        *_, before, first = weights[: 1 - 4 * SPEC.model.num_layers]  # the first of the last micro-batch
        assert before < reduced[0]
        assert sum(first < i < weights[-1] for i in reduced) > 2  # those of biases began in the pass before
        torch.testing.assert_close(sums, expected, rtol=0, atol=1e-12)


def order_of_events(ctx: ParallelContext) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Weight gradients and reductions as they begin; the sums, and those of 1f1b."""
    events: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "weight_gradient", noted("weight", linear.weight_gradient))
        patch.setattr(gradients, "start_all_reduce", noted("reduce", gradients.start_all_reduce))
        patch.setattr(gradients, "BUCKET_BYTES", 1000)
        patch.setattr(gradients, "BUCKET_BYTES_PER_RANK", 0)
        sums, _ = gradients_of(ctx, replace(SPEC, parallel=ParallelConfig(dp=2, pipeline="zb_h1")))
        second = events[len(events) // 2 :]  # two equal steps
        expected, _ = gradients_of(ctx, replace(SPEC, parallel=ParallelConfig(dp=2)))
    return second, sums, expected


BERT = tiny("bert", max_positions=SEQ, vocab_size=VOCAB)
LLAMA = tiny("llama", ffn_hidden_size=24, max_positions=SEQ, vocab_size=VOCAB, options={"num_kv_heads": 2})


def spec_of(kind: str, dtype: str, **parallel: Any) -> PretrainConfig:
    """A step of four micro-batches, or two for each of two replicas."""
    spec = replace(config(dtype=dtype), train=SPEC.train, parallel=ParallelConfig(**parallel))
    return replace(spec, model={"gpt2": SPEC.model, "bert": BERT, "llama": LLAMA}[kind])


def gradients_by(
    ctx: ParallelContext, spec: PretrainConfig, way: str
) -> tuple[dict[str, Tensor], int, list[bool]]:
    """Gradients after the second of two passes, early sums, and of each bucket if backward passes reduced it.

    `way`: "late" lets autograd add everything, "early" the loss and the lookup what they may.
    """
    trainer: Trainer[MicroBatch] = Trainer(spec, ctx)
    if way == "late":
        trainer.fused_grad_embeddings = []
    added, began = list[int](), list[bool]()
    original = cross_entropy.add_to_grad

    def counted(weight: Any, part: Tensor, factor: Tensor | None) -> None:
        added.append(1)
        original(weight, part, factor)

    def reduce() -> None:
        for reducer in trainer.reducers:
            began.extend(bucket.work is not None for bucket in reducer.buckets)
        Trainer.reduce_gradients(trainer)

    trainer.reduce_gradients = reduce  # type: ignore[method-assign]
    count = spec.train.global_batch_size // spec.train.micro_batch_size // ctx.dp.size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "add_to_grad", counted)
        for _ in range(2):
            trainer.compute_gradients(batches_of(spec, [spec.train.micro_batch_size] * count))
    assert not any(table.fuses_grad for table in trainer.fused_grad_embeddings)
    grads = {s.name: s.parameter.grad.clone() for s in trainer.shards if s.parameter.grad is not None}
    return grads, len(added), began


@pytest.mark.parametrize(
    ("kind", "dtype", "parallel"),
    [
        ("gpt2", "fp32", {"pp": 2, "dp": 2}),
        ("gpt2", "fp64", {"tp": 2, "pp": 2, "sequence_parallel": True, "pipeline": "zb_h1"}),
        ("bert", "bf16", {"pp": 2, "pipeline": "gpipe", "recompute": "full"}),
        ("llama", "fp16", {}),
    ],
)
def test_early_sums_are_those_of_autograd_bit_for_bit(
    kind: str, dtype: str, parallel: dict[str, Any]
) -> None:
    """On every rank; and buckets are reduced in the last backward pass as before."""
    spec = spec_of(kind, dtype, **parallel)
    sizes = {axis: parallel.get(axis, 1) for axis in ("tp", "pp", "dp")}
    late, early = (run_on_ranks(gradients_by, spec, way, **sizes) for way in ("late", "early"))
    each = 2 * MICRO_BATCHES // sizes["dp"]
    assert {added for _, added, _ in late} == {0}
    assert {added for _, added, _ in early} == ({0, each} if sizes["pp"] > 1 else {each})
    for (expected, _, began), (found, _, begins) in zip(late, early, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], grad) for name, grad in expected.items())
        assert begins == began
        assert all(begins)
        assert bool(begins) == (sizes["dp"] > 1)


@pytest.mark.parametrize(("kind", "dp"), [("gpt2", 2), ("bert", 1)])
def test_a_table_that_embeds_and_scores_gets_both_terms(kind: str, dp: int) -> None:
    """Over several micro-batches it differs from autograd's sum by the order of terms alone."""
    spec = spec_of(kind, "fp64", dp=dp)
    for (expected, none, _), (found, added, began) in zip(
        *(run_on_ranks(gradients_by, spec, way, dp=dp) for way in ("late", "early")), strict=True
    ):
        assert (none, added) == (0, 2 * MICRO_BATCHES // dp)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert all(began)


def early_names(ctx: ParallelContext, spec: PretrainConfig) -> list[str]:
    """Names of the tables whose gradients the loss adds."""
    trainer: Trainer[MicroBatch] = Trainer(spec, ctx)
    names = {module: name for chunk in trainer.model.chunks for name, module in chunk.named_modules()}
    return [names[table] for table in trainer.fused_grad_embeddings]


def test_sharded_tables_stay_with_fsdp_and_losses_of_user_families_with_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP2 keeps gradients elsewhere than in `grad`; user families may scale a loss, or recompute it."""
    sharded, whole = (
        run_on_ranks(early_names, spec_of("llama", "fp32", dp=2, zero=zero), dp=2) for zero in (2, 0)
    )
    assert sharded == [[], []]
    assert "output" in whole[0]
    monkeypatch.setattr(of_trainer, "KINDS", {})
    assert early_names(ParallelContext(), spec_of("llama", "fp32")) == []


def bytes_of_tables(overrides: str, micro_batches: int, device: torch.device) -> int:
    """The most bytes that the last stage holds in tensors of the table's size and more."""
    size = f"train.global_batch_size={micro_batches} train.micro_batch_size=1 data.seq_length=16"
    ready = config_of(*f"pp=2 model.vocab_size=4096 {size} {overrides}".split())
    found = dry_run(ready, 1, device=device, in_full=True)
    table = 4 * 4096 * ready.model.hidden_size
    held = most = 0
    for block, change in found.log.events:
        held += change if block.size >= table else 0
        most = max(most, held)
    return most // table


@pytest.mark.parametrize("device", [torch.device("cpu"), META], ids=str)
def test_the_last_stage_holds_no_table_for_a_micro_batch_in_flight(device: torch.device) -> None:
    """Weights, gradient, moments, and what one chunk of logits needs."""
    few, many = (bytes_of_tables("pipeline=gpipe precision=bf16", m, device) for m in (2, 12))
    assert few == many


def table() -> tuple[VocabParallelEmbedding, Tensor, Tensor]:
    torch.manual_seed(0)
    made = VocabParallelEmbedding(VOCAB, VOCAB, 8, tp=Axis("tp"))
    return made, torch.randn(5, 8, requires_grad=True), torch.randint(0, VOCAB, (5,))


def test_the_loss_adds_nothing_without_gradients_or_after_a_step_that_broke_off() -> None:
    made, hidden, labels = table()
    with fuse_embedding_grad([made]), torch.no_grad():
        linear_cross_entropy(hidden, labels, made, torch.tensor(1.0))
    with pytest.raises(KeyboardInterrupt), fuse_embedding_grad([made]):
        raise KeyboardInterrupt
    linear_cross_entropy(hidden, labels, made, torch.tensor(1.0))
    assert made.weight.grad is None


def test_a_gpu_adds_both_factors_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "ORDERED", ())
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    first, second = torch.randn(3, 2), torch.randn(3, 2).bfloat16()
    cross_entropy.add_to_grad(weight, first.clone(), torch.tensor(0.5))
    with Operators() as seen:
        cross_entropy.add_to_grad(weight, second, torch.tensor(0.25))
    torch.testing.assert_close(weight.grad, 0.5 * first + 0.25 * second.float())
    assert "aten.addcmul_.default" in seen.names
