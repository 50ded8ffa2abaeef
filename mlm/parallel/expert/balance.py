"""Loads of the experts over a step: counted on each rank, summed over ranks, and what they move."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mlm.parallel.collectives import all_reduce
from mlm.parallel.expert.router import Router
from mlm.parallel.mesh import Axis


class Balance:
    """The routers of a rank's layers, in a step: `start`, backward passes, `reduce`, `update`.

    Args:
        routers: of this rank's layers, by their numbers.
        axes: those whose ranks route different tokens; the counts are summed over them.
    """

    def __init__(self, routers: Mapping[int, Router], axes: Sequence[Axis]) -> None:
        self.layers, self.routers, self.axes = list(routers), list(routers.values()), axes
        self.totals: Tensor | None = None
        """[routers, 2, E] int64: tokens that chose each expert, and those it dropped, of this rank, after
        `reduce` of all."""

    @property
    def counts(self) -> Tensor | None:
        """[routers, E] int64: tokens that chose each expert."""
        return None if self.totals is None else self.totals[:, 0]

    def start(self, scale: Tensor) -> None:
        """Count from 0; `scale` (0-d) is the loss scale over the tokens of the global batch."""
        if not self.routers:
            return
        experts = self.routers[0].settings.num_experts
        self.totals = torch.zeros(len(self.routers), 2, experts, dtype=torch.int64, device=scale.device)
        for router, counts in zip(self.routers, self.totals, strict=True):
            router.scale, router.totals = scale, counts

    def reduce(self) -> None:
        """Sum the counts over ranks, one message for all layers; backward passes are over."""
        for router in self.routers:
            router.scale = router.totals = None
        if self.totals is not None:
            for axis in self.axes:
                all_reduce(self.totals, axis)

    def update(self, skip: Tensor) -> None:
        """Move biases and loads, unless `skip` (0-d) is 1."""
        if self.counts is not None:
            for router, counts in zip(self.routers, self.counts, strict=True):
                router.update(counts, skip)
