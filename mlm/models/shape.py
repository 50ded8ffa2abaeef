"""Sizes of a model: architecture, parameters, floating-point operations."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from mlm.models.config import KINDS, ModelConfig
from mlm.models.family import Architecture, family_of

if TYPE_CHECKING:  # checks of settings need no torch
    from torch import Tensor, nn


def architecture_of(model: ModelConfig) -> Architecture:
    """Return the family's parts and sizes of a model. Raises OwnCodeError as `family_of`."""
    return family_of(model.kind).architecture(model)


def is_tied(model: ModelConfig) -> bool:
    """True if the output layer is the token table, which the last stage then holds too."""
    return model.head == "language_model" and architecture_of(model).tied


def build_on_meta(model: ModelConfig) -> "nn.Module":
    """Return a full model in one process, without memory. Raises OwnCodeError as `family_of`."""
    with import_module("torch").device("meta"):
        full: nn.Module = family_of(model.kind).model(model)
    return full


def parameters_by_name(model: ModelConfig) -> "dict[str, Tensor]":
    """Parameters of a model on the meta device, without padding."""
    return dict(build_on_meta(replace(model, vocab_multiple=1)).named_parameters())


def count_parameters(model: ModelConfig, *, with_state: bool = False) -> int:
    """Count the parameters of a model in its modules on the meta device, without padding rows and copies.

    `with_state` includes state without gradients, such as the routers' loads of experts. Raises OwnCodeError
    (a UserError) for an unknown family.
    """
    return _sum_over_layers(model, lambda _, p: p.numel() if with_state or p.requires_grad else 0)


def count_active_parameters(model: ModelConfig) -> int:
    """Count the parameters that a token goes through, with its chosen experts only."""
    return _sum_over_layers(model, lambda name, p: _active_size(model, name, p) if p.requires_grad else 0)


def layer_weights(model: ModelConfig) -> float:
    """Elements of the matrices of a layer that a token goes through, the mean over the layers."""

    def size(name: str, p: "Tensor") -> int:
        is_matrix = p.dim() > 1 and not name.endswith("bias")  # of experts biases are stacked
        return _active_size(model, name, p) if name.startswith("layers.") and is_matrix else 0

    return _sum_over_layers(model, size) / model.num_layers


def _active_size(model: ModelConfig, name: str, p: "Tensor") -> int:
    parts = architecture_of(model)
    return p.numel() * parts.experts_per_token // parts.experts if ".experts." in name else p.numel()


def _sum_over_layers(model: ModelConfig, size: "Callable[[str, Tensor], int]") -> int:
    """Sum `size(name, parameter)`. Two of the equal layers are built, whatever num_layers a file claims."""

    def total(num_layers: int) -> int:
        parameters = parameters_by_name(replace(model, num_layers=num_layers))
        return sum(size(name, p) for name, p in parameters.items())

    distinct = num_distinct_layers(model)
    if model.num_layers <= distinct + 1:
        return total(model.num_layers)
    once, twice = total(distinct), total(distinct + 1)
    return once + (model.num_layers - distinct) * (twice - once)


def num_distinct_layers(model: ModelConfig) -> int:
    """Number of first layers after which all equal the last of them; all layers of a user's family."""
    layers, first = model.num_layers, architecture_of(model).dense_layers
    return min(layers, first + 1) if model.kind in KINDS else layers


def flops_per_token(model: ModelConfig, seq_length: int, tp: int = 1) -> float:
    """Model floating-point operations of one training token, forward and backward, no recomputation.

    Matrix products only: 6 per weight, plus 12 * L * N * D * S for attention scores and values
    (arXiv:2104.04473, section 5.1, without its recomputed forward pass; N * D is H there). Weights after
    the layers count as the family defines it: vocabulary projections of scored tokens.
    """
    parts = architecture_of(model)
    width = model.num_heads * (parts.head_dim + parts.values_dim)
    attention = 6 * model.num_layers * width * parts.attended(seq_length, model.num_layers)
    layers = model.num_layers * layer_weights(model)
    return 6 * (layers + family_of(model.kind).head_products(model, tp)) + attention
