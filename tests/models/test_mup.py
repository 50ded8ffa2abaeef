"""muP against table 8 of arXiv:2203.03466, and against itself at its base width."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from mlm.models.config import LoraConfig
from mlm.models.heads import PlainLinear
from mlm.models.llama.gated import GatedMLP
from mlm.models.llama.latent_attention import LatentAttention
from mlm.models.llama.mixture import MixtureOfExperts
from mlm.optim.config import MuonConfig, OptimizerConfig
from mlm.optim.groups import group_rates
from mlm.optim.muon import shape_scale
from mlm.parallel.expert.router import Router
from mlm.parallel.layers import ColumnParallelLinear
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.parallel.sharding import parameter_shards
from mlm.runs.config import PretrainConfig
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
        found = group_rates(name, dims, adam, spec.model.width_factor)
        if name.startswith("layers.") and dims == 2:
            assert found.lr_scale == 0.25
            assert found.lr_scale * found.weight_decay == pytest.approx(0.1)  # decay stays
            expected = usual[name].parameter / 2
        else:
            assert found.lr_scale == 1
            expected = usual[name].parameter
        torch.testing.assert_close(shard.parameter, expected, rtol=1e-6, atol=0)


def shards_of(spec: PretrainConfig) -> list:  # type: ignore[type-arg]
    model = build_model(spec, shape_context(), None, torch.device("cpu"), one_shape=True)
    return list(parameter_shards(model.chunks[0], model.ctx.tp))


MIXTURE = {"num_experts": 4, "expert_ffn_size": 16, "balance": "sequence"}
LATENT = {"kv_lora_rank": 4, "q_lora_rank": 4, "rope_head_dim": 2, "v_head_dim": 4, "head_dim": 6}


def special(width: int, base: int | None, options: dict[str, int | str], rank: int = 0) -> PretrainConfig:
    """A Llama with heads of one width at every width of its own."""
    spec = spec_of(width, base, "llama")
    model = replace(spec.model, num_heads=width // 4, options=options)
    return replace(spec, model=model, lora=LoraConfig(rank=rank, targets=("all-linear", "experts")))


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ("attention.query.weight", 1),  # from a rank, which no width widens
        ("attention.kv.weight", 1),
        ("attention.kv_down.weight", 1 / 4),
        ("attention.query_down.weight", 1 / 4),
        ("attention.out.weight", 1 / 4),
        ("mlp.router.weight", 1 / 4),
        ("mlp.experts.up", 1 / 4),
        ("mlp.experts.down", 1 / 4),
    ],
)
def test_adams_rate_is_of_the_inputs_that_widen(weight: str, scale: float) -> None:
    (shard,) = (s for s in shards_of(special(64, 16, MIXTURE | LATENT)) if s.name == f"layers.0.{weight}")
    adam = OptimizerConfig(lr=1e-2)
    found = group_rates(shard.name, shard.parameter.dim(), adam, 4.0, shard.constant_side)
    assert found.lr_scale == scale


def test_of_adapters_the_rate_of_a_falls_with_width_and_that_of_b_stays() -> None:
    """LoRA+ (arXiv:2402.12354): A's is Θ(1 / n), B's Θ(1)."""
    found = {
        shard.name.rpartition(".")[2]: group_rates(shard.name, 2, OptimizerConfig(), 4.0, shard.constant_side)
        for shard in shards_of(special(64, 16, MIXTURE, rank=2))
        if ".lora." in shard.name
    }
    assert {name for name in found if found[name].lr_scale == 1} == {"b", "up_b", "down_b"}
    assert {name for name in found if found[name].lr_scale == 0.25} == {"a", "up_a", "down_a"}


@pytest.mark.parametrize(
    ("scale", "side", "power"),
    [
        ("original", "in", 0),
        ("original", "out", 0.5),
        ("match_rms_adamw", "in", 0),
        ("match_rms_adamw", "out", 1),
    ],
)
def test_muons_update_follows_the_sides_of_a_matrix(scale: Any, side: str, power: float) -> None:
    """Its norm, shape_scale times the rate, grows as sqrt(outputs / inputs) (arXiv:2310.17813)."""
    muon = OptimizerConfig(kind="muon", lr=1e-2, muon=MuonConfig(scale=scale))
    factor = group_rates("layers.0.x.weight", 2, muon, 4.0, side).lr_scale
    assert factor == pytest.approx(4.0**-power)
    shapes = [(256, 8), (1024, 8)] if side == "in" else [(8, 256), (8, 1024)]
    narrow, wide = (shape_scale(shape, muon.muon) for shape in shapes)
    assert factor * wide / narrow == pytest.approx(2 if side == "in" else 1 / 2)


def test_logits_are_those_of_the_width_over_the_base() -> None:
    tokens = torch.arange(16).view(1, 16)
    wide, usual = (
        build_model(spec_of(64, base), shape_context(), None, torch.device("cpu"), one_shape=True).chunks[0]
        for base in (16, None)
    )
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


@pytest.mark.slow
@pytest.mark.parametrize("options", [MIXTURE, LATENT], ids=["experts", "latent"])
def test_a_step_moves_what_new_modules_give_no_further_in_a_wide_model(options: dict[str, Any]) -> None:
    """The coordinate check, of each module in a layer at eight times the width: changes grow by a half."""
    narrow, wide = (moved_by_module(special(width, 64, options)) for width in (64, 512))
    assert len(narrow) >= 3
    assert {name: wide[name] / x for name, x in narrow.items() if wide[name] > 1.5 * x} == {}


def moved_by_module(spec: PretrainConfig) -> dict[str, float]:
    """Root mean square of the change, in four steps, of what each module of the last layer gives."""
    schedule = replace(spec.schedule, decay="constant", warmup_steps=0)
    trainer: Trainer = Trainer(replace(spec, schedule=schedule), shape_context())
    (model,) = trainer.model.chunks
    outputs: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, module: torch.nn.Module, inputs: Any, y: Any) -> None:
        y = (
            inputs[0] @ module.weight.t() if isinstance(module, Router) else y
        )  # its scores before the softmax
        outputs.setdefault(name, []).append(y.detach().clone())

    def record() -> None:
        layer = list(model.layers.values())[-1]
        chosen = (Router, GatedMLP, MixtureOfExperts, ColumnParallelLinear, PlainLinear, LatentAttention)
        modules = [(name, m) for name, m in layer.named_modules() if isinstance(m, chosen)]
        hooks = [m.register_forward_hook(partial(keep, name)) for name, m in modules]
        outputs.setdefault("logits", []).append(model.logits(torch.arange(16).view(1, 16)).detach())
        for hook in hooks:
            hook.remove()

    record()
    steps_of(trainer, 4)
    record()
    return {name: float((y - x).square().mean().sqrt()) for name, (x, y) in outputs.items()}


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
