"""Every setting of a model reaches every module that it concerns, of each family and each of its options.

Layouts agree with one process also where a module does not read a setting, so that only this can tell.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.models.transformer import MLP
from mlm.parallel.expert.experts import Experts
from mlm.parallel.mesh import Axis
from tests.verify.parity_layouts import LLAMAS, MIXTURES, Layout

CASES = {
    "gpt2": Layout(),
    **{f"bert {norm}": Layout(bert=norm) for norm in ("pre", "post", "roberta")},
    **{name: Layout(llama=name) for name in LLAMAS},
    **{name: Layout(moe=name) for name in MIXTURES},
}
NORMS = nn.LayerNorm | nn.RMSNorm
LATENT_NORMS = ("query_down_norm", "kv_down_norm")
"""Their epsilon is DeepSeek's own."""
RESIDUAL = ("out.weight", "mlp.down.weight", "shared.down.weight", "experts.down")
"""Weights that write into the residual stream."""


def modules(model: ModelConfig) -> dict[str, nn.Module]:
    with torch.device("meta"):
        return dict(family_of(model.kind).model(model, tp=Axis("tp")).named_modules())


def stds(model: ModelConfig) -> dict[str, float]:
    """Standard deviations of initial weights, of all but biases, norms and states of routers."""
    found = {}
    for name, module in modules(model).items():
        for leaf, parameter in module.named_parameters(recurse=False):
            if not leaf.endswith("bias") and parameter.requires_grad and not isinstance(module, NORMS):
                known: Any = getattr(module, "init_stds", None) or {leaf: module.init_std}
                found[f"{name}.{leaf}"] = known[leaf]
    return found


def ratios(case: str, **change: Any) -> dict[str, float]:
    model = CASES[case].config().model
    before, after = stds(model), stds(replace(model, **change))
    assert before.keys() <= after.keys()
    return {name: after[name] / std for name, std in before.items()}


@pytest.mark.parametrize("case", CASES)
def test_init_std_scales_every_weight(case: str) -> None:
    assert set(ratios(case, init_std=0.04).values()) == {2.0}


@pytest.mark.parametrize("case", CASES)
def test_depth_scales_every_weight_that_writes_into_the_residual_stream(case: str) -> None:
    for name, ratio in ratios(case, num_layers=16).items():
        assert ratio == pytest.approx(0.5 if name.endswith(RESIDUAL) else 1.0), name


@pytest.mark.parametrize("case", [case for case in CASES if "bert" not in case])
def test_width_over_mups_base_scales_every_weight_by_its_sides(case: str) -> None:
    """Of hidden weights by 1 / sqrt(4), of inputs and products up from a rank not at all."""
    for name, ratio in ratios(case, mup_base_width=4).items():
        from_rank = case == "latent" and name.endswith((".query.weight", ".kv.weight"))
        expected = 0.5 if name.startswith("layers.") and not from_rank else 1.0
        assert ratio == pytest.approx(expected), name


def read(setting: str) -> Callable[[str, nn.Module], Any]:
    """Return what reads a setting from a module: None if the setting does not concern it."""

    def value(name: str, module: nn.Module) -> Any:
        leaf = name.rpartition(".")[2]
        match setting:
            case "layer_norm_eps":
                return module.eps if isinstance(module, NORMS) and leaf not in LATENT_NORMS else None
            case "hidden_dropout":
                return getattr(module, "dropout", None) if leaf.isdecimal() else None
            case "attention_dropout":
                return getattr(module, "dropout", None) if leaf == "attention" else None
        if isinstance(module, Experts):
            return module.inner.keywords["activation"]  # type: ignore[attr-defined]
        return module.activation if isinstance(module, MLP) or leaf == "masked_head" else None

    return value


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("setting", "value", "of_each_layer"),
    [
        ("layer_norm_eps", 0.25, 2),
        ("hidden_dropout", 0.25, 1),
        ("attention_dropout", 0.25, 1),
        ("activation", "gelu", 1),
    ],
)
def test_a_setting_reaches_every_module_that_it_concerns(
    case: str, setting: str, value: object, of_each_layer: int
) -> None:
    model = replace(CASES[case].config().model, **{setting: value})
    reader = read(setting)
    found = {name: x for name, module in modules(model).items() if (x := reader(name, module)) is not None}
    assert set(found.values()) == {value}
    assert len(found) >= of_each_layer * model.num_layers


TRIED = {
    *("init_std", "num_layers", "mup_base_width"),
    *("layer_norm_eps", "hidden_dropout", "attention_dropout", "activation"),
}
"""Settings of the tests above."""
SHAPES = {
    *("kind", "head", "norm", "hidden_size", "num_heads", "max_positions", "vocab_size", "vocab_multiple"),
    *("token_types", "num_labels", "options", "ffn_hidden_size"),
}
"""Settings that give parameters other names or shapes, so that weights of transformers would not load."""


def test_every_setting_of_a_model_is_tried() -> None:
    assert {field.name for field in fields(ModelConfig)} == TRIED | SHAPES
