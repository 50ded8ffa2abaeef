"""Ranks and groups: this process's coordinates on the parallel axes.

Rank order follows arXiv:2104.04473, section 3: tensor-parallel ranks are neighbours (they communicate most,
so they share a node), then context-parallel, data-parallel, and pipeline stages:
rank = ((stage * d + data) * c + context) * t + tensor.

Experts have separate axes over the same ranks, folded as in Megatron Core (arXiv:2504.14960): the ep ranks
that split them are neighbours among the replicas (data, then context) of a tensor rank, or among all ranks of
a stage if tp does not split experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mlm.parallel.mailbox import Mailbox, open_mailbox
from mlm.parallel.watch import Watch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Axis:
    """One axis of the device mesh as this rank sees it.

    `group` is None if the axis has one rank, or without communication (shapes only).
    """

    name: str
    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    ranks: tuple[int, ...] = ()
    """Global ranks along the axis, this one included; empty without a group."""
    watch: Watch = field(default_factory=Watch, compare=False)
    """Records waits on the axis, for reports of hangs."""
    through_host: bool = False
    """True if tensors are copied to host memory and back around each communication: gloo does not send or
    receive device memory, and its other operations differ by PyTorch version."""
    swaps: bool = False
    """True if two ranks sum by exchanging whole tensors, which is faster than gloo's sums."""
    mailbox: Mailbox | None = field(default=None, compare=False)
    """Shared memory for messages between two ranks of one host."""
    exact_parts: int = 0
    """Terms of each sum along the axis, at every size (exact.py); 0 means one per rank."""

    @property
    def parts(self) -> int:
        """Equal parts of a split tensor; each rank holds a whole number of them."""
        return self.exact_parts or self.size


AXES: dict[str, Axis] = {}
"""This rank's axes by the names of their groups, for custom operators, which take no objects."""


@dataclass(frozen=True)
class ExpertAxes:
    """Axes of a mixture's experts over the ranks of one pipeline stage."""

    ep: Axis = Axis("ep")
    """Ranks that hold different experts and exchange tokens: neighbours among the replicas."""
    tp: Axis = Axis("tp")
    """Ranks that split each expert: the tp ranks, or this one alone."""
    replicas: Axis | None = None
    """Ranks that hold the same experts, for sums of gradients and sharding of state; None means the replicas
    of the model."""


@dataclass(frozen=True)
class ParallelContext:
    """The axes of a layout on this rank. Built once, passed as an argument."""

    tp: Axis = Axis("tp")
    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    cp: Axis = Axis("cp")
    """Ranks that hold parts of the same sequences (mlm/parallel/context.py)."""
    dp_cp: Axis | None = None
    """dp and cp as one axis; None if cp has one rank."""
    experts: ExpertAxes = ExpertAxes()
    """Axes of a mixture of experts."""
    tied: Axis = Axis("tied")
    """The first and the last pipeline rank, which both hold the token table; one rank elsewhere."""
    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    host_group: ProcessGroup | None = None
    """All ranks over gloo, for messages outside the device: checkpoints, stop requests."""
    world: Axis = Axis("world")
    """`host_group` as an axis."""
    watch: Watch = field(default_factory=Watch, compare=False)
    """Shared by the axes."""

    @property
    def replicas(self) -> Axis:
        """Ranks with the same part of the model, for sums of gradients and sharding of state."""
        return self.dp if self.dp_cp is None else self.dp_cp

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def shape_context(
    rank: int = 0,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    expert_tp: int | None = None,
) -> ParallelContext:
    """Context of any rank of any layout without process groups: correct shapes, no communication."""
    folds = folds_tp(tp, expert_tp)
    lines = _ranks_of_axes(
        torch.arange(tp * pp * dp * cp, device=CPU).view(pp, dp, cp, tp), ep=ep, folds=folds
    )
    axes = {name: Axis(name) for name in lines}  # one rank, unless a group has this rank
    for name, groups in lines.items():
        for line in groups.tolist():
            if rank in line:
                axes[name] = Axis(name, line.index(rank), len(line))
    return _context(axes, folds=folds, rank=rank, world_size=tp * pp * dp * cp)


def build_mesh(
    *,
    tp: int,
    pp: int,
    dp: int,
    device: torch.device,
    timeout_s: float,
    cp: int = 1,
    ep: int = 1,
    expert_tp: int | None = None,
    watch: Watch | None = None,
    host_backend: str = "gloo",
) -> ParallelContext:
    """Create the process groups of a layout. Every rank of an initialised default group calls this.

    `watch` is the watchdog's, if any. `host_backend` is the backend of `host_group`; "fake" lets one process
    be any rank of any layout. Raises AssertionError if tp * cp * pp * dp is not the world size: configuration
    is checked before launch.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = f"tp={tp} * cp={cp} * pp={pp} * dp={dp}"
    assert tp * cp * pp * dp == world_size, f"{sizes} is not world_size={world_size}"
    watch = watch or Watch(rank, timeout_s)
    folds = folds_tp(tp, expert_tp)
    lines = _ranks_of_axes(torch.arange(world_size).view(pp, dp, cp, tp), ep=ep, folds=folds)
    axes = {
        name: _make_axis(name, line.tolist(), rank, timeout_s, watch, device) for name, line in lines.items()
    }
    hosts = host_group(world_size, timeout_s, host_backend)
    if hosts is not None:
        dist.barrier(hosts)  # gloo returns once this rank is connected; an early exit would fail other ranks
    all_ranks = tuple(range(world_size)) if hosts is not None else ()
    return _context(
        axes,
        folds=folds,
        rank=rank,
        world_size=world_size,
        device=device,
        host_group=hosts,
        world=Axis("world", rank, world_size, hosts, all_ranks, watch),
        watch=watch,
    )


def _context(axes: Mapping[str, Axis], *, folds: bool, **fields: Any) -> ParallelContext:
    """Build the context from axes and other `fields`; `folds` if the axes of experts include tp ranks."""
    experts = ExpertAxes(
        ep=axes.get("ep", Axis("ep")),
        tp=Axis("tp") if folds else axes["tp"],
        replicas=axes.get("expert_replicas"),
    )
    fields |= {name: axis for name, axis in axes.items() if name not in ("ep", "expert_replicas")}
    return ParallelContext(experts=experts, **fields)


def _ranks_of_axes(ranks: Tensor, *, ep: int, folds: bool) -> dict[str, Tensor]:
    """Ranks of each group of each axis, [groups, size], from all ranks [pp, dp, cp, tp]."""
    pp, dp, cp, tp = ranks.shape
    lines = {"tp": ranks.reshape(-1, tp), "pp": ranks.permute(1, 2, 3, 0).reshape(-1, pp)}
    lines["dp"] = ranks.permute(0, 2, 3, 1).reshape(-1, dp)
    if cp > 1:
        lines["cp"] = ranks.permute(0, 1, 3, 2).reshape(-1, cp)
        lines["dp_cp"] = ranks.flatten(1, 2).permute(0, 2, 1).reshape(-1, dp * cp)
    lines["tied"] = lines["pp"][:, [0, -1]] if pp > 1 else lines["pp"]
    if ep > 1 or folds:
        same = ranks.reshape(pp, -1) if folds else ranks.permute(0, 3, 1, 2).reshape(pp * tp, -1)
        blocks = same.view(len(same), -1, ep)  # neighbours hold different experts
        lines["ep"] = blocks.reshape(-1, ep)
        lines["expert_replicas"] = blocks.transpose(1, 2).reshape(-1, blocks.shape[1])
    return lines


def folds_tp(tp: int, expert_tp: int | None) -> bool:
    """True if tp does not split experts, so that the axes of experts include tp ranks."""
    return tp > 1 and expert_tp == 1


def host_group(world_size: int, timeout_s: float, backend: str = "gloo") -> ProcessGroup | None:
    """Create a group of all ranks for host memory; None for one rank. Every rank calls this.

    A thread that communicates concurrently needs a separate group.
    """
    if world_size == 1:
        return None
    group: ProcessGroup = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
    return group


def _make_axis(
    name: str, lines: list[list[int]], rank: int, timeout_s: float, watch: Watch, device: torch.device
) -> Axis:
    """Create this rank's axis `name`; every rank creates every group, in one order."""
    axis, limit, options = Axis(name, watch=watch), timedelta(seconds=timeout_s), None
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)  # not in every build
    if nccl is not None and name == "tp" and device.type == "cuda" and dist.get_backend() == "nccl":
        # The next layer waits for sums over tp, so their kernels take precedence over the kernels of a
        # layer's weight gradients, which otherwise fill the device.
        options = nccl.Options()
        options.is_high_priority_stream = True
        options._timeout = limit  # PyTorch warns if it differs from the group's
    for line in lines:
        if len(line) > 1:
            group = dist.new_group(line, timeout=limit, pg_options=options)
            if rank in line:
                is_gloo = dist.get_backend(group) == "gloo"
                through_host, swaps = is_gloo and device.type == "cuda", is_gloo and len(line) == 2
                at = line.index(rank)
                mailbox = open_mailbox(group, at, timeout_s) if swaps else None
                axis = Axis(name, at, len(line), group, tuple(line), watch, through_host, swaps, mailbox)
                AXES[group.group_name] = axis
    return axis
