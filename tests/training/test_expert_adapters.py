"""Adapters of routed experts: the formula of merged weights, and every layout as one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mlm.models.config import LoraConfig, ModelConfig
from mlm.models.family import family_of
from mlm.models.lora import add_adapters, merged_changes
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.parallel.random import init_parameters, init_shard
from mlm.runs.config import PretrainConfig
from mlm.training.state import load
from mlm.training.trainer import Trainer
from tests.models.tiny import tiny
from tests.ranks import run_on_ranks
from tests.slow import slow_but
from tests.training.saving import save
from tests.training.test_trainer import steps_of
from tests.verify.parity_layouts import Layout, parse_layouts

LORA = LoraConfig(rank=2, alpha=6.0, targets=("experts", "out"))
LAYOUTS = parse_layouts(
    "tp=2 dp=2 ep=2 moe=sigmoid",
    "tp=2 sequence_parallel expert_tp=1 ep=2 micro_batches=4 moe=sigmoid",
    "dp=4 ep=2 zero=3 micro_batches=1 moe=sigmoid",
)
OVER_EP, *STAGES = parse_layouts(
    "dp=2 ep=2 moe=sigmoid",
    "pp=2 pipeline=zb_h1 micro_batches=4",
    "pp=2 tp=2 sequence_parallel dp=2 zero=1 recompute=full micro_batches=2",
)
"""Of the last two one stage has no adapter where one layer has."""


def adapting(layout: Layout) -> PretrainConfig:
    spec = layout.config()
    return replace(spec, lora=LORA, optimizer=replace(spec.optimizer, lr=0.05))


def started(ctx: ParallelContext, spec: PretrainConfig) -> Trainer:
    trainer = Trainer(spec, ctx)
    for shard in trainer.shards:
        if not shard.is_trained:  # a base to load; its initial values are equal at every layout
            init_shard(replace(shard, parameter=shard.parameter.requires_grad_()), spec.seed)
            shard.parameter.requires_grad_(False)
    return trainer


def train(ctx: ParallelContext, spec: PretrainConfig) -> list[float]:
    return steps_of(started(ctx, spec), 4)


@pytest.mark.parametrize("layout", slow_but({0}, LAYOUTS), ids=str)
def test_adapters_of_experts_train_the_same_at_every_layout(layout: Layout) -> None:
    alone = train(shape_context(), adapting(Layout(moe="sigmoid", micro_batches=4)))
    assert len({round(loss, 6) for loss in alone}) == 4  # they learn
    split = run_on_ranks(train, adapting(layout), **layout.sizes)[0]
    assert split == pytest.approx(alone, abs=1e-10)


@pytest.mark.slow
def test_adapters_of_experts_alone_train_over_ep() -> None:
    """No trained parameter is replicated over all of dp then."""
    lora = replace(LORA, targets=("experts",))
    alone = train(shape_context(), replace(adapting(Layout(moe="sigmoid", micro_batches=4)), lora=lora))
    split = run_on_ranks(train, replace(adapting(OVER_EP), lora=lora), **OVER_EP.sizes)[0]
    assert split == pytest.approx(alone, abs=1e-10)


def resumed(ctx: ParallelContext, spec: PretrainConfig, out: Path) -> list[float]:
    """Losses of two steps, and of two more after a checkpoint."""
    first, second = started(ctx, spec), started(ctx, spec)
    losses = steps_of(first, 2)
    load(second, save(first, out))
    return losses + steps_of(second, 2)


@pytest.mark.parametrize(("layout", "layer"), slow_but({0}, zip(STAGES, (0, 3), strict=True)), ids=str)
def test_a_stage_without_adapters_trains_and_resumes_as_one_process(
    layout: Layout, layer: int, tmp_path: Path
) -> None:
    lora = replace(LORA, targets=(f"layers.{layer}.attention.out",))
    alone = train(shape_context(), replace(adapting(Layout(micro_batches=4)), lora=lora))
    assert len({round(loss, 6) for loss in alone}) == 4  # they learn
    spec = replace(adapting(layout), lora=lora)
    assert run_on_ranks(resumed, spec, tmp_path, **layout.sizes)[0] == pytest.approx(alone, abs=1e-10)


def mixture() -> ModelConfig:
    options = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8}
    return tiny("llama", num_layers=1, num_heads=2, ffn_hidden_size=16, vocab_size=64, options=options)


def test_outputs_and_gradients_are_those_of_the_merged_weights() -> None:
    """With W' = W + s B A: dB = s dW' A^T and dA = s B^T dW', for each expert."""
    config, lora = mixture(), replace(LORA, targets=("experts",))
    ours, merged = (family_of(config.kind).model(config, dtype=torch.float64).double() for _ in range(2))
    for model in (ours, merged):
        init_parameters(model, 0)
    add_adapters(ours, lora, {})
    ours.double()
    adapters = {name: p for name, p in ours.named_parameters() if ".lora." in name}
    weights = dict(merged.named_parameters())
    torch.manual_seed(1)
    with torch.no_grad():
        for p in adapters.values():
            p.normal_(0, 0.1)
        for name, change_of in merged_changes(config, lora, {}, adapters).items():
            weights[name] += change_of().change
    tokens = torch.randint(64, (2, 9))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (ours, merged)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    for loss in losses:
        loss.backward()
    for weight in ("up", "down"):
        a, b = (adapters[f"layers.0.mlp.experts.lora.{weight}_{part}"] for part in "ab")
        grad = weights[f"layers.0.mlp.experts.{weight}"].grad
        grad, each, d_each = (x.flatten(1, -2) for x in (grad, b, b.grad))  # gates and the rest
        torch.testing.assert_close(d_each, lora.scale * grad @ a.mT)
        torch.testing.assert_close(a.grad, lora.scale * each.mT @ grad)
