"""Sizes of a model: the parts that its family decides, parameters, floating-point operations."""

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from mlm.models.config import KINDS, ModelConfig
from mlm.models.family import Architecture, family_of

if TYPE_CHECKING:  # checks of settings need no torch
    from torch import Tensor


def architecture_of(model: ModelConfig) -> Architecture:
    """Return the parts and sizes that the family decides. Raises OwnCodeError as `family_of`."""
    return family_of(model.kind).architecture(model)


def is_tied(model: ModelConfig) -> bool:
    """True if the output layer is the token table, which the last stage then holds too."""
    return model.head == "language_model" and architecture_of(model).tied


def parameters_by_name(model: ModelConfig) -> "dict[str, Tensor]":
    """Parameters of a model on the meta device, without padding. Raises OwnCodeError as `family_of`."""
    with import_module("torch").device("meta"):
        whole = family_of(model.kind).model(replace(model, vocab_multiple=1))
    return dict(whole.named_parameters())


def count_parameters(model: ModelConfig, *, with_state: bool = False) -> int:
    """Parameters of a model, counted in its modules on the meta device; padding rows and copies not.

    `with_state` counts those that no gradient moves too: what routers know of the loads of experts.
    Of layers that are alike two are built, however many a file claims. Raises OwnCodeError (a UserError) if
    there is no such family.
    """

    def count(num_layers: int) -> int:
        some = parameters_by_name(replace(model, num_layers=num_layers)).values()
        return sum(p.numel() for p in some if with_state or p.requires_grad)

    built = count_distinct(model)
    if model.num_layers <= built + 1:
        return count(model.num_layers)
    one, two = count(built), count(built + 1)
    return one + (model.num_layers - built) * (two - one)


def count_distinct(model: ModelConfig) -> int:
    """First layers of a model of which the last is like all after it: all of those of a user's own family."""
    layers, first = model.num_layers, architecture_of(model).dense_layers
    return min(layers, first + 1) if model.kind in KINDS else layers


def count_active_parameters(model: ModelConfig) -> int:
    """Parameters that a token goes through: of each layer's experts those that it chooses."""
    parts = architecture_of(model)
    idle = (parts.experts - parts.experts_per_token) * _mlp_weights(model, parts.expert_size)
    return count_parameters(model) - (model.num_layers - parts.dense_layers) * idle


def layer_weights(model: ModelConfig) -> float:
    """Elements of the matrices of a layer that a token goes through, the mean over the layers."""
    parts, h = architecture_of(model), model.hidden_size
    attention = 2 * h * parts.head_dim * (model.num_heads + parts.kv_heads)
    mlp = float(_mlp_weights(model, model.ffn_size))
    if parts.experts:
        width = parts.experts_per_token * parts.expert_size + parts.shared_size
        mixture = _mlp_weights(model, width) + h * parts.experts
        mlp = mixture + (mlp - mixture) * parts.dense_layers / model.num_layers
    return (parts.attention_weights or attention) + mlp


def _mlp_weights(model: ModelConfig, width: int) -> int:
    """Elements of the matrices of an MLP of this width."""
    return (3 if architecture_of(model).gated else 2) * model.hidden_size * width


def flops_per_token(model: ModelConfig, seq_length: int, tp: int = 1) -> float:
    """Model floating-point operations of one training token, forward and backward, no recomputation.

    Matrix products only: 6 per weight, plus 12 * L * N * D * S for attention scores and values
    (arXiv:2104.04473, section 5.1, without its recomputed forward pass; N * D is H there). Weights after
    the layers count as the family defines it: vocabulary projections of scored tokens.
    """
    parts = architecture_of(model)
    width = model.num_heads * (parts.head_dim + parts.values_dim)
    attention = 6 * model.num_layers * width * parts.attended(seq_length)
    layers = model.num_layers * layer_weights(model)
    return 6 * (layers + family_of(model.kind).head_products(model, tp)) + attention
