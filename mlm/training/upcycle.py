"""Upcycling: a mixture of experts that starts from a dense model (arXiv:2212.05055, arXiv:2410.07524).

Each expert is a copy of the dense MLP, routers have fresh initial weights, all other weights are the dense
model's. If the weights of a token's experts add up to 1, the first logits equal the dense model's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.models.llama.settings import num_blocks
from mlm.parallel.sharding import ParameterShard
from mlm.runs.config import PretrainConfig

T = TypeVar("T")


def dense_config(config: PretrainConfig, saved: Mapping[str, Any]) -> PretrainConfig | None:
    """Return a run's settings with the dense model that it is upcycled from; None if it is not upcycled.

    A run is upcycled if its model has experts and the model of the `saved` run spec has none.
    """
    model = saved.get("model")
    options = model.get("options") if isinstance(model, Mapping) else None
    has_experts = isinstance(options, Mapping) and options.get("num_experts")
    dense = None if has_experts else family_of(config.model.kind).dense_twin(config.model)
    return None if dense is None else replace(config, model=dense)


def start_from_dense(
    model: ModelConfig, shards: Sequence[ParameterShard], fill: Callable[[list[ParameterShard]], T]
) -> T:
    """Fill a mixture's parameters, routers aside, from a dense model; return the result of `fill`.

    `fill` fills parameters of the dense model.
    """
    dense = {shard.name: _dense_shard(shard) for shard in shards if ".mlp.router." not in shard.name}
    filled = fill(list(dense.values()))
    block = model.ffn_size // num_blocks(model)
    with torch.no_grad():
        for shard in shards:
            if shard.experts is not None:
                weight = dense[shard.name].parameter
                if ".experts.up" in shard.name:  # gates and ups, which an MLP interleaves in blocks
                    weight = weight.unflatten(0, (-1, 2, block)).transpose(0, 1).flatten(1, 2)
                shard.parameter.copy_(weight.expand_as(shard.parameter))
    return filled


def _dense_shard(shard: ParameterShard) -> ParameterShard:
    """Return this rank's part of the dense MLP's parameter for one of experts; other shards unchanged."""
    if shard.experts is None:
        return shard
    name, (*parts, last) = shard.name.replace(".experts.", "."), shard.parameter.shape[1:]
    if name.endswith("_bias"):
        name, dim, shape = f"{name.removesuffix('_bias')}.bias", 0, [math.prod((*parts, last))]
    else:
        name, dim, shape = f"{name}.weight", 0 if parts[1:] else 1, [math.prod(parts), last]
    weight = nn.Parameter(shard.parameter.new_empty(shape), requires_grad=False)
    return replace(shard, name=name, parameter=weight, tp_dim=dim, dp_slice=None, experts=None)
