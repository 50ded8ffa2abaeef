"""Upcycling: a mixture of experts that starts from a dense model (arXiv:2212.05055, arXiv:2410.07524).

Each expert is a copy of the dense MLP, routers have initial weights of their own, all else is the dense
model's. Where the weights of a token's experts add up to 1, the first logits are those of the dense model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mlm.parallel.collectives import gather_rows
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import ParameterShard, parameter_shards
from mlm.training.config import PretrainConfig
from mlm.training.pipelined import PipelinedModel

COPIES = {"experts.up": ("up.weight", 0), "experts.down": ("down.weight", 1)}
"""Parameter of all experts -> the MLP's that each is a copy of, and its dim that tp splits."""


def dense_config(config: PretrainConfig, saved: Mapping[str, Any]) -> PretrainConfig | None:
    """Return a run's settings with the dense model that it is upcycled from; None if it is not.

    It is where its model has experts and that of the `saved` run spec has none.
    """
    model = saved.get("model")
    options = model.get("options") if isinstance(model, Mapping) else None
    has_experts = isinstance(options, Mapping) and options.get("num_experts")
    dense = None if has_experts else config.model.family.dense_twin(config.model)
    return None if dense is None else replace(config, model=dense)


def start_from_dense(
    shards: Iterable[ParameterShard],
    dense: PretrainConfig,
    ctx: ParallelContext,
    fill: Callable[[list[ParameterShard]], object],
) -> None:
    """Fill the parameters of a mixture of experts from a dense model, but those of routers. Collective.

    Args:
        shards: parameters of the mixture.
        dense: the run's settings with the dense model.
        ctx: ranks and axes.
        fill: fills the parameters of the dense model.
    """
    twin = PipelinedModel(dense.model, replace(dense.parallel, zero=0), dense.precision, ctx)
    found = {s.name: s for chunk in twin.chunks for s in parameter_shards(chunk, ctx.tp)}
    fill(list(found.values()))
    with torch.no_grad():
        for shard in shards:
            block, _, name = shard.name.partition(".mlp.")
            if shard.name in found:
                shard.parameter.copy_(_rows(found[shard.name].parameter, shard))
            elif name in COPIES:
                source, dim = COPIES[name]
                one = _over_tp(found[f"{block}.mlp.{source}"].parameter, dim, shard, ctx.tp)
                shard.parameter.copy_(one.expand_as(shard.parameter))


def _rows(x: Tensor, shard: ParameterShard) -> Tensor:
    """Return what a shard holds of its tensor-parallel part."""
    if shard.dp_slice is None:
        return x
    first = shard.dp_slice.first_row
    return x[first : first + len(shard.parameter)]


def _over_tp(x: Tensor, dim: int, shard: ParameterShard, tp: Axis) -> Tensor:
    """Return an MLP's weight as the ranks that split an expert hold it: whole where tp does not."""
    if shard.tp.size == tp.size:
        return x
    return gather_rows(x.transpose(0, dim).contiguous(), tp).transpose(0, dim)
