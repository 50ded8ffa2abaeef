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
from mlm.incidents.findings import Numbers, shared_numbers
from mlm.optim.clip import gradient_norm
from mlm.parallel.watch import name_ranks
from mlm.train.trainer import Trainer

Traffic = Sequence[tuple[bool, Tensor]]
"""`Watch.traffic` of a pass."""
ALIKE = 0.5
"""Share by which the largest magnitudes of two passes may differ: far above rounding."""


@dataclass(frozen=True)
class SecondPass:
    """A step's numbers when it is computed again, the same on every rank."""

    numbers: Numbers
    ranks: list[int]
    """Ranks on which the first pass began to differ; none where no message shows it."""
    hosts: list[str]
    """Theirs."""

    def line(self, *, was_finite: bool) -> str:
        """Return what it says about the first pass, and what to do."""
        seen = f"first seen on {self.where()}" if self.ranks else "no rank is known to be the first"
        state, values = "normal" if was_finite else "finite", self.numbers
        return (
            f"computed again: {state} (loss {values.loss:.6g}, gradient norm {values.norm:.6g}); "
            f"not in the data; {seen}; {self.advice()}"
        )

    def where(self) -> str:
        """Return the ranks in words: rank 1 (host a)."""
        hosts = sorted(set(self.hosts))
        return f"{name_ranks(self.ranks)} (host{'s' * (len(hosts) > 1)} {', '.join(hosts)})"

    def advice(self) -> str:
        """Return what to do if it happens again."""
        if not self.ranks:
            return "if it comes back, test memory and processors, or leave out one host at a time"
        return f"if it comes back, test the memory and the processor of {self.where()}, or run without it"

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        values = {"loss": self.numbers.loss, "grad_norm": self.numbers.norm}
        return {**values, "ranks": self.ranks, "hosts": self.hosts, "advice": self.advice()}


def compute_again(trainer: Trainer, batches: Sequence[Any], parts: Tensor, norm: Tensor) -> SecondPass:
    """Compute the step again: gradients, `parts` and `norm` hold the second pass's afterwards. Collective."""
    ctx, watch = trainer.ctx, trainer.ctx.watch
    first, watch.traffic = watch.traffic or [], []
    parts.copy_(trainer.forward_backward(batches))
    norm.copy_(gradient_norm(trainer.shards, ctx) / trainer.scaler.scale)
    numbers = shared_numbers(trainer, parts, norm)
    begins = ctx.world_size == 1 or begins_here(first, watch.traffic)
    found = Ranks.of(ctx).all_gather([socket.gethostname(), begins])
    ranks = [rank for rank, (_, is_first) in enumerate(found) if is_first]
    return SecondPass(numbers, ranks, [found[rank][0] for rank in ranks])


def begins_here(first: Traffic, second: Traffic) -> bool:
    """Return True if the first message in which two passes differ is one that this rank sent."""
    count = min(len(first), len(second))
    if not count:
        return False
    before, after = (torch.stack([x.double() for _, x in each[:count]]) for each in (first, second))
    differs = ~torch.isclose(before, after, rtol=ALIKE, atol=0.0, equal_nan=True)
    return bool(differs.any()) and first[int(differs.int().argmax())][0]
