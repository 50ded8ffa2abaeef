"""Mixtures of experts that start from a dense model."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.cli.pretrain.run import start_from_source
from mlm.models.llama.settings import num_blocks
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.resume import start_problems
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.saving import save
from tests.verify.parity_layouts import Layout

EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "balance": "bias"}


def config_of(layout: Layout, out: Path, ckpt: Path | None = None, **options: Any) -> PretrainConfig:
    """The settings of a run; `options` are those of experts."""
    config = layout.config()
    model = replace(config.model, options=config.model.options | options)
    values = {f.name: getattr(config, f.name) for f in fields(PretrainConfig)}
    return PretrainConfig(**values | {"model": model, "out": str(out), "ckpt": ckpt and str(ckpt)})


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], Tensor]:
    """A checkpoint of a dense run at step 3, its parameters, and logits of TOKENS."""
    out = tmp_path_factory.mktemp("dense")
    trainer = Trainer(config_of(Layout(llama="llama"), out), shape_context())
    for shard in trainer.shards:  # weights that no seed draws
        shard.parameter.data.add_(0.01)
    trainer.step = 3
    parameters = {s.name: s.parameter.detach().clone() for s in trainer.shards}
    return save(trainer, out), parameters, trainer.model.chunks[0].logits(TOKENS)


TOKENS = torch.arange(32).view(2, 16) % 61


def test_the_first_logits_are_those_of_the_dense_model(tmp_path: Path, dense: Any) -> None:
    """Step 0, without moments; routers have their own initial weights."""
    path, _, want = dense
    config = config_of(Layout(llama="llama"), tmp_path, path, **EXPERTS)
    assert start_problems(config) == []
    trainer = Trainer(config, shape_context())
    drawn = trainer.model.chunks[0].layers["1"].mlp.router.weight.detach().clone()
    start_from_source(trainer, str(path))
    chunk = trainer.model.chunks[0]
    assert trainer.step == 0
    assert drawn.any()
    assert torch.equal(chunk.layers["1"].mlp.router.weight, drawn)
    torch.testing.assert_close(chunk.logits(TOKENS), want, rtol=1e-12, atol=1e-12)


LAYOUTS = [
    Layout(tp=2, dp=2, zero=3, llama="llama"),
    Layout(tp=2, sequence_parallel=True, dp=2, ep=2, expert_tp=1, llama="llama"),  # whole experts
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_starts_from_any(tmp_path: Path, dense: Any, layout: Layout) -> None:
    """Each rank's part of each expert, and of what is not of experts."""
    path, parameters, _ = dense
    config, axes = (
        config_of(layout, tmp_path, path, **EXPERTS),
        {"ep": layout.ep, "expert_tp": layout.expert_tp},
    )
    run_on_ranks(check_parts, config, path, parameters, **layout.sizes | axes)


def check_parts(ctx: ParallelContext, config: PretrainConfig, path: Path, dense: dict[str, Tensor]) -> None:
    trainer = Trainer(config, ctx)
    start_from_source(trainer, str(path))
    for shard in trainer.shards:
        if ".router." in shard.name:
            continue
        name = shard.name.replace("experts.up", "up.weight").replace("experts.down", "down.weight")
        whole = dense[name]
        if shard.name.endswith("experts.up"):  # [block][gate, up] of the MLP
            blocks = num_blocks(config.model)
            whole = torch.stack([whole.unflatten(0, (blocks, 2, -1))[:, n].flatten(0, 1) for n in (0, 1)])
        whole = whole.expand(shard.global_shape) if shard.experts else whole
        part = shard.without_padding(shard.parameter.detach())
        region = tuple(slice(o, o + n) for o, n in zip(shard.offset, part.shape, strict=True))
        assert torch.equal(part, whole[region]), shard.name


WRONG = [
    ({"expert_ffn_size": 32}, "model.options.expert_ffn_size=32: experts that start from a dense model are"),
    ({"shared_experts": 1}, "model.options.shared_experts=1: experts that start from a dense model are"),
    ({"num_kv_heads": 4}, "model.options="),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=str)
def test_a_model_that_cannot_start_so_is_rejected(
    tmp_path: Path, dense: Any, options: dict[str, Any], words: str
) -> None:
    """In one line that names setting and fix."""
    (problem,) = start_problems(config_of(Layout(llama="llama"), tmp_path, dense[0], **EXPERTS | options))
    assert words in str(problem)
    assert "\n" not in str(problem)


def test_a_dense_run_of_its_own_is_not_upcycled(dense: Any) -> None:
    """A run's folder continues that run alone."""
    path = dense[0]
    problem, *_ = start_problems(config_of(Layout(llama="llama"), path.parents[1], **EXPERTS))
    assert str(problem).startswith("model.options.num_experts=4: the run in")
