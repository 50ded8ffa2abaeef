"""Findings of all ranks together: the first place of an incident, and its words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.parallel.collectives import all_reduce
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.watch import name_ranks
from mlm.training.incidents.probe import Probe
from mlm.training.trainer import Trainer


@dataclass(frozen=True)
class Numbers:
    """Numbers of a step, the same on every rank."""

    loss: float
    norm: float
    scale: float = 1.0
    """fp16: loss scale, where gradients overflowed."""


def sum_numbers(trainer: Trainer, parts: Tensor, norm: Tensor) -> Tensor:
    """Return a step's loss and gradient norm, bit for bit the same on all ranks: [2]. Collective."""
    ctx = trainer.ctx
    loss = parts[: trainer.objective.losses].sum()
    mine = torch.stack([loss.to(norm.dtype) / ctx.tp.size, norm / ctx.world_size])
    if ctx.device.type == "cpu":  # the group of all ranks is gloo: one message
        all_reduce(mine, ctx.world)
    else:
        axes = (ctx.tp, ctx.replicas, ctx.pp)
        for axis in axes:
            all_reduce(mine, axis)
        for (
            axis
        ) in axes:  # groups of other ranks may have summed in another order: the largest is one for all
            all_reduce(mine, axis, dist.ReduceOp.MAX)
    return mine


def shared_numbers(trainer: Trainer, parts: Tensor, norm: Tensor) -> Numbers:
    """Return a step's numbers, bit for bit the same on all ranks. Collective; reads the device."""
    values, scaler = sum_numbers(trainer, parts, norm).tolist(), trainer.scaler
    scale = float(scaler.scale.item()) if scaler.dynamic and not math.isfinite(values[1]) else 1.0
    return Numbers(values[0], values[1], scale)


def beyond(numbers: Tensor, limits: Sequence[float]) -> Tensor:
    """Return 1.0 if one of the numbers is not finite or has reached its limit, else 0.0: 0-d."""
    exact = numbers.double()  # limits are compared as numbers of the host are
    within = exact.isfinite().all()
    for number, most in zip(exact.unbind(), limits, strict=True):
        within = within & (number < most)
    return within.logical_not().to(numbers.dtype)


@dataclass(frozen=True)
class Findings:
    """Places of a repeated step, the same on every rank."""

    first_bad: dict[str, Any] | None
    """First number that is not finite: tensor, name, sample, position, ranks."""
    outlier: dict[str, Any] | None
    """First activation or gradient of one sample that is far from those of others."""
    heaviest: dict[str, Any] | None
    """Sample with the largest gradient."""

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        return {"first_not_finite": self.first_bad, "first_outlier": self.outlier, "heaviest": self.heaviest}

    def lines(self) -> list[str]:
        """Sentences for a reader, the most telling first."""
        found = []
        if self.first_bad is not None:
            found.append(f"the first number that is not finite is in {words(self.first_bad)}")
        if self.outlier is not None:
            far = self.outlier["deviations"]
            found.append(f"the first outlier is {words(self.outlier)}, {far:g} deviations from other samples")
        if self.heaviest is not None:
            one = self.heaviest
            found.append(
                f"sample {one['sample']} has the largest gradient, {one['norm']:.3g} at {one['name']}"
            )
        return found


def gather(probe: Probe, ctx: ParallelContext) -> Findings:
    """Compare what each rank's probe saw. Collective over all ranks."""
    mine = [probe.first_bad(), probe.first_outlier(), probe.heaviest_sample()]
    found = Ranks.of(ctx).all_gather(mine)
    bad, outliers, heaviest = ([each[n] for each in found] for n in range(3))
    heavy = [one for one in heaviest if one is not None]
    return Findings(
        earliest(bad), earliest(outliers), max(heavy, key=lambda one: one["norm"]) if heavy else None
    )


def earliest(places: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the place that is computed first, with the ranks on which it is."""
    known = [(place["order"], rank) for rank, place in enumerate(places) if place is not None]
    if not known:
        return None
    first = min(known)[0]
    ranks = [rank for order, rank in known if order == first]
    place = dict(places[ranks[0]] or {})
    return {**{key: value for key, value in place.items() if key != "order"}, "ranks": ranks}


def words(place: dict[str, Any]) -> str:
    """Return a place as words: the output of layers.1.mlp.up, sample 12, position 3, on rank 1."""
    tensor = place["tensor"]
    link = "at the output of" if tensor == "gradient" else "of"
    text = f"the {tensor} {link} {place['name']}"
    for key in ("sample", "position"):
        if place.get(key) is not None:
            text += f", {key} {place[key]}"
    return f"{text}, on {name_ranks(place['ranks'])}"
