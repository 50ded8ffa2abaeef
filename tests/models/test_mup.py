"""muP against table 8 of arXiv:2203.03466, and against itself at its base width."""

from dataclasses import replace
from math import sqrt

import pytest
import torch

from mlm.models.config import ModelConfig
from mlm.optim.config import MuonConfig, OptimizerConfig
from mlm.optim.groups import rates
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.parallel.sharding import parameter_shards
from mlm.training.checks import check_pretrain
from mlm.training.config import PretrainConfig
from mlm.training.trainer import Trainer, build_model
from tests.ranks import run_on_ranks
from tests.training.test_trainer import config, steps_of, train


def spec_of(width: int, base: int | None, kind: str = "gpt2") -> PretrainConfig:
    spec = config()
    activation = "silu" if kind == "llama" else "gelu_tanh"
    model = replace(spec.model, kind=kind, hidden_size=width, activation=activation, mup_base_width=base)
    return replace(spec, model=model)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_initial_values_and_rates_follow_table_8_at_four_times_the_width(kind: str) -> None:
    """Of layers' matrices variance and Adam's rate fall as 1 / width; tables, norms and biases stay."""
    spec = spec_of(64, 16, kind)
    adam = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    stds, usual = ({s.name: s for s in shards_of(x)} for x in (spec, spec_of(64, None, kind)))
    for name, shard in stds.items():
        dims = shard.parameter.dim()
        found = rates(name, dims, adam, spec.model.width_factor)
        if name.startswith("layers.") and dims == 2:
            assert found.lr_scale == 0.25
            assert found.lr_scale * found.weight_decay == pytest.approx(0.1)  # decay stays
            expected = usual[name].parameter / 2
        else:
            assert found.lr_scale == 1
            expected = usual[name].parameter
        torch.testing.assert_close(shard.parameter, expected, rtol=1e-6, atol=0)


def shards_of(spec: PretrainConfig) -> list:  # type: ignore[type-arg]
    model = build_model(spec, shape_context())
    return list(parameter_shards(model.chunks[0], model.ctx.tp))


def test_muon_needs_a_factor_only_for_the_scale_that_matches_adamw() -> None:
    muon = OptimizerConfig(kind="muon", lr=1e-2)
    original = replace(muon, muon=MuonConfig(scale="original"))
    assert rates("layers.0.mlp.up.weight", 2, muon, 4.0).lr_scale == pytest.approx(1 / sqrt(4))
    assert rates("layers.0.mlp.up.weight", 2, original, 4.0).lr_scale == 1


def test_logits_are_those_of_the_width_over_the_base() -> None:
    tokens = torch.arange(16).view(1, 16)
    wide, usual = (build_model(spec_of(64, base), shape_context()).chunks[0] for base in (16, None))
    usual.load_state_dict(wide.state_dict())
    torch.testing.assert_close(wide.logits(tokens) * 4, usual.logits(tokens), rtol=1e-12, atol=1e-12)


def test_at_the_base_width_nothing_changes_and_layouts_agree() -> None:
    losses = {base: run_on_ranks(train, spec_of(16, base), 3)[0] for base in (16, None, 8)}
    assert losses[16] == losses[None] != losses[8]
    assert run_on_ranks(train, spec_of(16, 8), 3, tp=2, dp=2)[0] == pytest.approx(losses[8], abs=1e-10)


def test_a_step_moves_the_outputs_of_a_wide_model_no_further() -> None:
    """The coordinate check: without muP the change grows with width, with it by a third at most."""
    growth = {}
    for mup in (True, False):
        moved = {width: change_of(spec_of(width, 16 if mup else None)) for width in (16, 128)}
        growth[mup] = moved[128] / moved[16]
    assert growth[True] < 1.34
    assert growth[False] > 2


def change_of(spec: PretrainConfig) -> float:
    """Mean change of the logits in four steps."""
    model = replace(spec.model, num_heads=spec.model.hidden_size // 4)
    schedule = replace(spec.schedule, decay="constant", warmup_steps=0)
    ctx: ParallelContext = shape_context()
    trainer: Trainer = Trainer(replace(spec, model=model, schedule=schedule), ctx)
    tokens = torch.arange(16).view(1, 16)
    before = trainer.model.chunks[0].logits(tokens)
    steps_of(trainer, 4)
    return float((trainer.model.chunks[0].logits(tokens) - before).abs().mean())


def test_bert_has_no_mup() -> None:
    spec = spec_of(16, 8)
    model = ModelConfig(
        kind="bert", num_layers=2, hidden_size=16, num_heads=4, mup_base_width=8, token_types=2
    )
    problems = check_pretrain(replace(spec, model=model), world_size=1, local_devices=None)
    assert any("model.mup_base_width=8: muP is for gpt2 and llama, not bert" in str(p) for p in problems)
