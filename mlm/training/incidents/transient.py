"""A step computed again: if its fault came from hardware, and on which ranks it began.

A number spreads to other ranks by messages alone. The rank whose own computation made it sends it before
receiving it; all others receive it first. Inside layers that torch.compile fuses, messages over tp are not
recorded: there all tp ranks are named.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.optim.clip import gradient_norm
from mlm.parallel.watch import name_ranks
from mlm.training.incidents.findings import Numbers, shared_numbers
from mlm.training.trainer import Trainer

ALIKE = 0.5
"""Share by which the largest magnitudes of two passes may differ: far above rounding."""


@dataclass(frozen=True)
class SecondPass:
    """A step's numbers when it is computed again, the same on every rank."""

    numbers: Numbers
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
        numbers = f"loss {self.numbers.loss:.6g}, gradient norm {self.numbers.norm:.6g}"
        return f"computed again: {state} ({numbers}); not in the data; {seen}; {self.advice}"

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
    parts.copy_(trainer.forward_backward(batches))
    norm.copy_(gradient_norm(trainer.shards, ctx) / trainer.scaler.scale)
    numbers = shared_numbers(trainer, parts, norm)
    begins = ctx.world_size == 1 or begins_here(first, watch.traffic)
    found = Ranks.of(ctx).all_gather([socket.gethostname(), begins])
    hosts = {rank: host for rank, (host, is_first) in enumerate(found) if is_first}
    where = f"{name_ranks(list(hosts))} (host {', '.join(sorted(set(hosts.values())))})" if hosts else ""
    return SecondPass(numbers, list(hosts), where)


def begins_here(first: Sequence[tuple[bool, Tensor]], second: Sequence[tuple[bool, Tensor]]) -> bool:
    """Return True if the first message in which two passes differ is one that this rank sent.

    Both are `Watch.traffic` of a pass.
    """
    count = min(len(first), len(second))
    if not count:
        return False
    before, after = (torch.stack([x.double() for _, x in each[:count]]) for each in (first, second))
    differs = ~torch.isclose(before, after, rtol=ALIKE, atol=0.0, equal_nan=True)
    return bool(differs.any()) and first[int(differs.int().argmax())][0]
