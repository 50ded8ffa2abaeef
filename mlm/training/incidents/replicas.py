"""Comparison of what must be equal bit for bit on several ranks, by digests.

Weights and moments over dp and cp where they are replicated, replicated tensors over tp, the token table over
the first and last pipeline stage, and counters, learning rate and loss scale everywhere.
"""

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.optim.adamw import applied_steps, moment, moments
from mlm.parallel.collectives import all_gather
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import ParameterShard
from mlm.parallel.watch import name_ranks
from mlm.training.trainer import Trainer

LISTED = 8
"""Tensors that a mismatch names."""


def digest(x: Tensor) -> int | Tensor:
    """Return a number that any flipped bit of a tensor changes; of a GPU's, a 0-d int64 tensor on it.

    A GPU adds the bits up as integers, which reads the tensor once: a single flip always changes the sum.
    """
    x = x.detach()
    if x.device.type == "cpu":
        content = x.contiguous().flatten().view(torch.uint8).numpy().data
        return xxhash.xxh3_64_intdigest(content) >> 1  # fits int64
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().flatten().view(width).sum(dtype=torch.int64)


def digests(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return those of several tensors: int64 [n]."""
    found = [digest(x) for x in tensors.values()]
    if device.type == "cpu":
        return torch.tensor(found, dtype=torch.int64)
    return torch.stack([x for x in found if isinstance(x, Tensor)])


def compared(trainer: Trainer) -> list[tuple[Axis, dict[str, Tensor]]]:
    """Return what is compared over each axis of several ranks: tensors by name, in the same order on all."""
    ctx, shards = trainer.ctx, trainer.shards
    over_dp = [s for s in shards if s.dp_slice is None]
    over_tp = [s for s in shards if s.tp_dim is None]
    tables = [s for s in shards if isinstance(s.module, VocabParallelEmbedding)]
    chosen = [
        (ctx.replicas, over_dp),
        (ctx.tp, over_tp),
        *([(ctx.tied, tables)] if trainer.config.model.is_tied else []),
    ]
    found = [(axis, state_of(trainer, some)) for axis, some in chosen if axis.size > 1]
    return [(axis, tensors) for axis, tensors in found if tensors]


def state_of(trainer: Trainer, shards: Sequence[ParameterShard]) -> dict[str, Tensor]:
    """Return parameters and moments by name."""
    names = moments(trainer.optimizer)
    found = {s.name: s.parameter.detach() for s in shards}
    return found | {
        f"{name} of {s.name}": moment(trainer.optimizer, s, name) for s in shards for name in names
    }


def counters(trainer: Trainer) -> dict[str, float]:
    """Return the numbers that all ranks must have in common."""
    return {
        "step": trainer.step,
        "data position": trainer.consumed_samples,
        "learning rate": trainer.optimizer.param_groups[0]["lr"],
        "loss scale": float(trainer.scaler.scale.item()),
        "applied steps": applied_steps(trainer.optimizer),
    }


def differences(trainer: Trainer) -> list[str]:
    """Return a line for each tensor or counter that is not equal everywhere. Collective; empty if all are."""
    ctx, ranks = trainer.ctx, Ranks.of(trainer.ctx)
    if ctx.world_size == 1:
        return []
    torn: list[dict[str, Any]] = []
    for axis, tensors in compared(trainer):
        rows = all_gather(digests(tensors, ctx.device), axis).tolist()  # [size][n]
        for number, name in enumerate(tensors):
            column = [row[number] for row in rows]
            if len(set(column)) > 1:
                torn.append({"axis": axis.name, "name": name, "ranks": odd_ones(column, axis.ranks)})
    mine = counters(trainer)
    flat = torch.tensor([mine[name] for name in mine], dtype=torch.float64)
    numbers = all_gather(flat, ctx.world).tolist()
    for index, name in enumerate(mine):
        column = [row[index] for row in numbers]
        if len(set(column)) > 1:
            torn.append({"axis": "world", "name": name, "ranks": odd_ones(column, ctx.world.ranks)})
    if not ranks.any_of([bool(torn)])[0]:
        return []
    return described(ranks.all_gather([socket.gethostname(), torn[:LISTED]]))


def odd_ones(values: Sequence[float], ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose value is not that of most; all of them where no value has a majority."""
    common, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(ranks)
    return [rank for rank, value in zip(ranks, values, strict=True) if value != common]


def described(found: Sequence[Any]) -> list[str]:
    """Return a line for each difference, from every rank's host name and list."""
    hosts = [host for host, _ in found]
    lines = dict[str, None]()
    for _, torn in found:
        for one in torn:
            ranks = one["ranks"]
            where = ", ".join(sorted({hosts[rank] for rank in ranks}))
            lines[f"{one['name']} differs over {one['axis']} on {name_ranks(ranks)} (host {where})"] = None
    return list(lines)[:LISTED]
