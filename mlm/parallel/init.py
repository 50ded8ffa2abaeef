"""Initial weights, equal at every layout.

Each parameter's full tensor is a function of (seed, name); a rank keeps its slice. Weights are N(0, 0.02²),
those that write into the residual stream scaled by 1/sqrt(2L) (arXiv:1909.08053, section 4.1; each module's
`init_std` holds its own), biases zero, norm weights one.
"""

import torch
from torch import nn

from mlm.parallel.mesh import Axis
from mlm.parallel.random import derive_seed, draw_normal
from mlm.parallel.sharding import ParameterShard, parameter_shards


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int, tp: Axis | None = None) -> None:
    """Fill every parameter of `model`, on its device, with its initial value; `tp` None is one process."""
    for shard in parameter_shards(model, tp or Axis("tp")):
        init_shard(shard, seed)


@torch.no_grad()
def init_shard(shard: ParameterShard, seed: int) -> None:
    """Fill a rank's part of one parameter with its initial value; one on the meta device has none."""
    if shard.parameter.is_meta:
        return
    std = getattr(shard.module, "init_std", None)
    if shard.name.endswith("bias"):
        shard.parameter.zero_()
    elif std is None:
        assert isinstance(shard.module, nn.LayerNorm | nn.RMSNorm), f"no init_std for {shard.name}"
        shard.parameter.fill_(1.0)
    else:
        _draw(shard, std, derive_seed(seed, shard.name))


def _draw(shard: ParameterShard, std: float, seed: int) -> None:
    shape, target = shard.global_shape, shard.without_padding(shard.parameter)
    shard.parameter.zero_()  # rows that pad the vocabulary
    if shard.tp_dim == 0:
        first = shard.offset[0]
        target.copy_(draw_normal(shape, std, seed, range(first, first + target.shape[0])))
        return
    block = max(1, (1 << 22) // max(1, shape[-1]))  # bounds the memory of drawing a tensor split by columns
    for first in range(0, shape[0], block):
        rows = range(first, min(first + block, shape[0]))
        drawn = draw_normal(shape, std, seed, rows)
        if shard.tp_dim is not None:
            drawn = drawn.narrow(shard.tp_dim, shard.offset[shard.tp_dim], target.shape[shard.tp_dim])
        target[rows.start : rows.stop].copy_(drawn)
