"""Comparison of ranks that must hold equal bits."""

import socket
from collections import Counter
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.models.shape import is_tied
from mlm.optim.adamw import applied_steps, moment, moments
from mlm.parallel.collectives import all_gather
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import ParameterShard
from mlm.parallel.watch import name_ranks
from mlm.training.trainer import Trainer

LISTED = 8
"""Tensors that a mismatch names."""


def digest(x: Tensor) -> Tensor:
    """Return a number that any flipped bit of a tensor changes, on its device: 0-d int64.

    A GPU adds the bits up as integers, which reads the tensor once: a single flip always changes the sum.
    """
    x = x.detach().contiguous().flatten()
    if x.device.type == "cpu":
        return torch.tensor(xxhash.xxh3_64_intdigest(x.view(torch.uint8).numpy().data) >> 1)  # fits int64
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.view(width).sum(dtype=torch.int64)


def tensors_to_compare(trainer: Trainer) -> list[tuple[Axis, dict[str, Tensor]]]:
    """Return each axis with parameters and moments, by name, that must be equal over it; in one order.

    Replicated tensors are compared over dp and cp, unsplit ones over tp, tied token tables over the first and
    last stage.
    """
    ctx, shards = trainer.ctx, trainer.shards
    by_axis: dict[Axis, list[ParameterShard]] = {ctx.replicas: []}
    for shard in shards:
        if shard.dp_slice is None:
            by_axis.setdefault(shard.replica_axis(ctx.replicas), []).append(shard)
    compared = [*by_axis.items(), (ctx.tp, [shard for shard in shards if shard.tp_dim is None])]
    if is_tied(trainer.config.model):
        compared.append((ctx.tied, [s for s in shards if isinstance(s.module, VocabParallelEmbedding)]))

    def tensors_of(chosen: Sequence[ParameterShard]) -> dict[str, Tensor]:
        tensors = {shard.name: shard.parameter.detach() for shard in chosen}
        for shard in chosen:
            for name in moments(trainer.optimizer, shard) if shard.is_trained else ():
                tensors[f"{name} of {shard.name}"] = moment(trainer.optimizer, shard, name)
        return tensors

    return [(axis, tensors_of(chosen)) for axis, chosen in compared if axis.size > 1 and chosen]


def replica_differences(trainer: Trainer) -> list[str]:
    """Return a line for each tensor or counter that differs between ranks. Collective."""
    ctx, ranks = trainer.ctx, Ranks.of(trainer.ctx)
    if ctx.world_size == 1:
        return []
    counters = {
        "step": trainer.step,
        "data position": trainer.consumed_samples,
        "learning rate": trainer.optimizer.param_groups[0]["lr"],
        "loss scale": float(trainer.scaler.scale.item()),
        "applied steps": applied_steps(trainer.optimizer),
    }
    compared = [
        (axis, list(tensors), torch.stack([*map(digest, tensors.values())]))
        for axis, tensors in tensors_to_compare(trainer)
    ]
    compared.append((ctx.world, list(counters), torch.tensor([*counters.values()], dtype=torch.float64)))
    differing = list[tuple[str, list[int]]]()
    for axis, names, values in compared:
        for name, column in zip(names, all_gather(values, axis).T.tolist(), strict=True):
            if len(set(column)) > 1:
                differing.append((f"{name} differs over {axis.name}", minority_ranks(column, axis.ranks)))
    if not ranks.any_of([bool(differing)])[0]:
        return []
    answers = ranks.all_gather([socket.gethostname(), differing[:LISTED]])
    lines = dict[str, None]()  # without repetitions, in order
    for difference, minority in (entry for _, entries in answers for entry in entries):
        hosts = sorted({answers[rank][0] for rank in minority})
        lines[f"{difference} on {name_ranks(minority)} (host {', '.join(hosts)})"] = None
    return list(lines)[:LISTED]


def minority_ranks(values: Sequence[float], ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose value differs from the majority's; all without a majority."""
    common, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(ranks)
    return [rank for rank, value in zip(ranks, values, strict=True) if value != common]
