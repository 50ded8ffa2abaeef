"""Random numbers as functions of (seed, name), without generator state; initial weights.

Dropout masks (dropout.py) are drawn per sample and site, initial weights per parameter: each full tensor is a
function of (seed, name), and a rank keeps its slice. Restarts, recomputation and other layouts give the same
numbers without saved state.
"""

import math
import zlib

import torch
from torch import Tensor, nn

from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import ParameterShard, parameter_shards
from mlm.util.splitmix import GOLDEN, MASK, mix_int


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and names; the same on every machine."""
    state = GOLDEN
    for part in parts:
        value = zlib.crc32(part.encode()) | 1 << 40 if isinstance(part, str) else part
        state = mix_int(state ^ (value & MASK))
    return state >> 1


def draw_normal(shape: tuple[int, ...], std: float, seed: int, rows: range | None = None) -> Tensor:
    """float32 N(0, std²) tensor of `shape` on the CPU; with `rows`, only those rows of it.

    Drawn in blocks of rows with a seed each, so that a rank draws little more than its rows.
    """
    rows = range(shape[0]) if rows is None else rows
    block = max(1, (1 << 18) // max(1, math.prod(shape[1:])))  # a function of the global shape alone
    out, generator = torch.empty((len(rows), *shape[1:])), torch.Generator()
    if len(rows) == 0:
        return out
    for index in range(rows.start // block, -(-rows.stop // block)):
        first, last = index * block, min((index + 1) * block, shape[0])
        generator.manual_seed(derive_seed(seed, index))
        drawn = torch.empty((last - first, *shape[1:])).normal_(0.0, std, generator=generator)
        low, high = max(first, rows.start), min(last, rows.stop)
        out[low - rows.start : high - rows.start] = drawn[low - first : high - first]
    return out


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int, tp: Axis | None = None) -> None:
    """Fill every parameter of `model`, on its device, with its initial value; `tp` None is one process.

    Weights are N(0, 0.02²), those that write into the residual stream scaled by 1/sqrt(2L) (arXiv:1909.08053,
    section 4.1; each module's `init_std` holds its own), biases zero, norm weights one, or zero where a
    norm adds one.
    """
    for shard in parameter_shards(model, tp or Axis("tp")):
        init_shard(shard, seed)


@torch.no_grad()
def init_shard(shard: ParameterShard, seed: int) -> None:
    """Fill a rank's part of one parameter with its initial value, unless on the meta device."""
    if shard.parameter.is_meta:
        return
    stds: dict[str, float] = getattr(shard.module, "init_stds", {})  # modules with several
    std = stds.get(shard.name.rpartition(".")[2], getattr(shard.module, "init_std", None))
    if shard.name.endswith("bias") or not shard.is_trained:
        shard.parameter.zero_()
    elif std is None:
        assert isinstance(shard.module, nn.LayerNorm | nn.RMSNorm), f"no init_std for {shard.name}"
        shard.parameter.fill_(getattr(shard.module, "initial_value", 1.0))
    else:
        shape, target = shard.global_shape, shard.without_padding(shard.parameter)
        shard.parameter.zero_()  # rows that pad the vocabulary
        first, count = shard.offset[0], target.shape[0]
        block = max(1, (1 << 22) // max(1, math.prod(shape[1:])))  # bounds the memory of other ranks' columns
        for start in range(0, count, block):
            rows = range(first + start, first + min(start + block, count))
            drawn = draw_normal(shape, std, derive_seed(seed, shard.name), rows)
            if shard.tp_dim:
                drawn = drawn.narrow(shard.tp_dim, shard.offset[shard.tp_dim], target.shape[shard.tp_dim])
            target[start : start + len(rows)].copy_(drawn)
