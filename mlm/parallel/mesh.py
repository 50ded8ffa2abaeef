"""Ranks and groups: where this process stands on each parallel axis.

Rank order follows arXiv:2104.04473, section 3: tensor-parallel ranks are neighbours (they talk most, so
they share a node), then data-parallel, then pipeline stages. rank = (stage * d + data) * t + tensor.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Axis:
    """One axis of the device mesh as this rank sees it.

    `group` is None when the axis has one rank, or when nothing is to be communicated (shapes only).
    """

    name: str
    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelContext:
    """Everything a module needs to know about the layout. Built once, passed as an argument."""

    tp: Axis = Axis("tp")
    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    host_group: ProcessGroup | None = None
    """All ranks over gloo, for what is no tensor on the device: checkpoints, stop requests."""

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.rank == 0


def coordinates(rank: int, *, tp: int, pp: int, dp: int) -> tuple[int, int, int]:
    """(tensor, pipeline, data) rank of a global rank."""
    assert 0 <= rank < tp * pp * dp
    return rank % tp, rank // (tp * dp), rank // tp % dp


def shape_context(rank: int = 0, *, tp: int = 1, pp: int = 1, dp: int = 1) -> ParallelContext:
    """The context of any rank of any layout without process groups: shapes right, no communication."""
    t, p, d = coordinates(rank, tp=tp, pp=pp, dp=dp)
    return ParallelContext(
        tp=Axis("tp", t, tp), pp=Axis("pp", p, pp), dp=Axis("dp", d, dp), rank=rank, world_size=tp * pp * dp
    )


def build_mesh(*, tp: int, pp: int, dp: int, device: torch.device, timeout_s: float) -> ParallelContext:
    """Make the process groups of a layout. Every rank of an initialised default group calls this.

    Raises AssertionError if tp * pp * dp is not the world size: configuration is checked before launch.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert tp * pp * dp == world_size, f"tp={tp} * pp={pp} * dp={dp} is not world_size={world_size}"
    timeout = timedelta(seconds=timeout_s)
    mine = dict(zip("tpd", coordinates(rank, tp=tp, pp=pp, dp=dp), strict=True))
    ranks = torch.arange(world_size).view(pp, dp, tp)
    lines = {"t": ranks.reshape(-1, tp), "p": ranks.permute(1, 2, 0).reshape(-1, pp)}
    lines["d"] = ranks.permute(0, 2, 1).reshape(-1, dp)
    axes = {}
    for key, name in (("t", "tp"), ("p", "pp"), ("d", "dp")):
        own: ProcessGroup | None = None
        for line in lines[key].tolist():  # every rank makes every group, in one order
            if len(line) > 1:
                group = dist.new_group(line, timeout=timeout)
                own = group if rank in line else own
        axes[name] = Axis(name, mine[key], lines[key].shape[1], own)
    host_group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
    return ParallelContext(**axes, rank=rank, world_size=world_size, device=device, host_group=host_group)
