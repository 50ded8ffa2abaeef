"""Comparison of ranks that must hold equal bits, and of an incident's step with a second pass of it.

Weights and moments are compared over dp and cp where they are replicated, replicated tensors over tp, the
token table over the first and last pipeline stage, and counters, learning rate and loss scale everywhere.

The first step of an incident is computed again to see if its fault came from hardware, and on which ranks it
began. A number spreads to other ranks by messages alone. The rank whose own computation made it sends it
before receiving it; all others receive it first. Inside layers that torch.compile fuses, messages over tp are
not recorded: there all tp ranks are named.
"""

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.models.shape import is_tied
from mlm.optim.adamw import applied_steps, moment, moments
from mlm.optim.clip import gradient_norm
from mlm.parallel.collectives import all_gather
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import ParameterShard
from mlm.parallel.watch import name_ranks
from mlm.training.incidents.numbers import StepNumbers, shared_numbers
from mlm.training.trainer import Trainer

LISTED = 8
"""Tensors that a mismatch names."""
ALIKE = 0.5
"""Share by which the largest magnitudes of two passes may differ: far above rounding."""


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
    """Return what is compared over each axis of several ranks: tensors by name, in the same order on all."""
    ctx, shards = trainer.ctx, trainer.shards
    whole = [s for s in shards if s.dp_slice is None]
    over_tp = [s for s in shards if s.tp_dim is None]
    by_axis = {ctx.replicas: list[ParameterShard]()}
    for s in whole:
        by_axis.setdefault(s.replica_axis(ctx.replicas), []).append(s)
    tables = [s for s in shards if isinstance(s.module, VocabParallelEmbedding)]
    chosen = [
        *by_axis.items(),
        (ctx.tp, over_tp),
        *([(ctx.tied, tables)] if is_tied(trainer.config.model) else []),
    ]
    pairs = [(axis, parameters_and_moments(trainer, some)) for axis, some in chosen if axis.size > 1]
    return [(axis, tensors) for axis, tensors in pairs if tensors]


def parameters_and_moments(trainer: Trainer, shards: Sequence[ParameterShard]) -> dict[str, Tensor]:
    """Return parameters and moments by name."""
    parameters = {s.name: s.parameter.detach() for s in shards}
    return parameters | {
        f"{name} of {s.name}": moment(trainer.optimizer, s, name)
        for s in shards
        if s.is_trained
        for name in moments(trainer.optimizer, s)
    }


def replica_differences(trainer: Trainer) -> list[str]:
    """Return a line for each tensor or counter that is not equal everywhere. Collective; empty if all are."""
    ctx, ranks = trainer.ctx, Ranks.of(trainer.ctx)
    if ctx.world_size == 1:
        return []
    mine = {
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
    compared.append((ctx.world, list(mine), torch.tensor([*mine.values()], dtype=torch.float64)))
    torn = list[tuple[str, list[int]]]()
    for axis, names, values in compared:
        for name, column in zip(names, all_gather(values, axis).T.tolist(), strict=True):
            if len(set(column)) > 1:
                torn.append((f"{name} differs over {axis.name}", minority_ranks(column, axis.ranks)))
    if not ranks.any_of([bool(torn)])[0]:
        return []
    answers = ranks.all_gather([socket.gethostname(), torn[:LISTED]])
    hosts, lines = [host for host, _ in answers], dict[str, None]()
    for what, odd in (one for _, torn in answers for one in torn):
        lines[f"{what} on {name_ranks(odd)} (host {', '.join(sorted({hosts[rank] for rank in odd}))})"] = None
    return list(lines)[:LISTED]


def minority_ranks(values: Sequence[float], ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose value is not that of most; all of them where no value has a majority."""
    common, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(ranks)
    return [rank for rank, value in zip(ranks, values, strict=True) if value != common]


@dataclass(frozen=True)
class SecondPass:
    """A step's numbers when it is computed again, the same on every rank."""

    numbers: StepNumbers
    ranks: list[int]
    """Ranks on which the first pass began to differ; none where no message shows it."""
    where: str
    """They and their hosts, in words."""

    @property
    def advice(self) -> str:
        """Advice for the case that it happens again."""
        suspect = f"the memory and the processor of {self.where}" if self.ranks else "memory and processors"
        return f"if it comes back, test {suspect}"

    def line(self, state: str) -> str:
        """Return what it says about the first pass, and what to do; `state` says what the second is."""
        seen = f"first seen on {self.where}" if self.ranks else "no message shows on which rank"
        return f"computed again: {state} ({self.numbers}); not in the data; {seen}; {self.advice}"

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "loss": self.numbers.loss,
            "grad_norm": self.numbers.norm,
            "ranks": self.ranks,
            "advice": self.advice,
        }


def compute_again(trainer: Trainer, batches: Sequence[Any], parts: Tensor, norm: Tensor) -> SecondPass:
    """Compute the step again: gradients, `parts` and `norm` hold the second pass's afterwards. Collective."""
    ctx, watch = trainer.ctx, trainer.ctx.watch
    first, watch.traffic = watch.traffic or [], []
    parts.copy_(trainer.compute_gradients(batches))
    norm.copy_(gradient_norm(trainer.shards, ctx) / trainer.scaler.scale)
    numbers = shared_numbers(trainer, parts, norm)
    begins = ctx.world_size == 1 or fault_begins_here(first, watch.traffic)
    answers = Ranks.of(ctx).all_gather([socket.gethostname(), begins])
    hosts = {rank: host for rank, (host, is_first) in enumerate(answers) if is_first}
    where = f"{name_ranks(list(hosts))} (host {', '.join(sorted(set(hosts.values())))})" if hosts else ""
    return SecondPass(numbers, list(hosts), where)


def fault_begins_here(first: Sequence[tuple[bool, Tensor]], second: Sequence[tuple[bool, Tensor]]) -> bool:
    """Return True if the first message in which two passes differ is one that this rank sent.

    Both are `Watch.traffic` of a pass.
    """
    count = min(len(first), len(second))
    if not count:
        return False
    before, after = (torch.stack([x.double() for _, x in each[:count]]) for each in (first, second))
    differs = ~torch.isclose(before, after, rtol=ALIKE, atol=0.0, equal_nan=True)
    return bool(differs.any()) and first[int(differs.int().argmax())][0]
