"""Process groups for programs that call the library: a script under torchrun or SLURM, a notebook."""

import atexit
import os
import sys
from numbers import Integral

import torch
import torch.distributed as distributed

from mlm.launch.config import DistConfig
from mlm.launch.environment import RankPosition, position_variables, read_rank_position
from mlm.launch.process import ALONE, init_world, rank_device
from mlm.launch.rendezvous import START_S, rendezvous_store
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.mesh import build_mesh as build_groups
from mlm.util.errors import ConfigError, Problem, UserError, type_of


def build_mesh(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    device: str | torch.device = "auto",
    timeout_s: float = 600.0,
) -> ParallelContext:
    """Make the process groups of a layout. Collective over all ranks.

    Under torchrun or SLURM it joins the other ranks, unless `torch.distributed` is initialised already. The
    groups are destroyed when the program ends without an error. Without a launcher there is one rank.

    Args:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        cp: Context-parallel size. The data-parallel size is world size / (tp * pp * cp).
        device: auto, cpu or cuda, or a torch.device of these; auto takes a GPU if there is one and the
            ranks' backend serves it.
        timeout_s: Seconds after which a collective that has not finished counts as hung.

    Raises:
        UserError: The layout does not divide the world size, or there is no such device.
    """
    for key, size in (("tp", tp), ("pp", pp), ("cp", cp)):
        if not isinstance(size, Integral):
            raise UserError(f"{key}={size!r}: {type_of(size)}, not an integer; pass 1 or more")
    position = _rank_position()
    ranks = tp * pp * cp
    if min(tp, pp, cp) < 1 or position.world_size % ranks:
        more = "" if cp == 1 else f" cp={cp}"
        plain = f"use tp=1 pp=1{' cp=1' if more else ''}"
        raise UserError(
            f"tp={tp} pp={pp}{more}: does not divide world_size={position.world_size}",
            keys=("tp", "pp", "cp"),
            fix=f"start {ranks} ranks (torchrun --nproc-per-node {ranks} …), or {plain}"
            if ranks > 1
            else plain,
        )
    local_device = _rank_device(device, position)
    if position.world_size == 1:
        return ParallelContext(device=local_device)
    if not distributed.is_initialized():
        os.environ.update(position_variables(position))  # SLURM sets others
        init_world(position, rendezvous_store(position, timeout_s), local_device, max(START_S, timeout_s))
        atexit.register(_destroy_groups)
    dp = position.world_size // ranks
    return build_groups(tp=tp, pp=pp, dp=dp, cp=cp, device=local_device, timeout_s=timeout_s)


def _destroy_groups() -> None:
    """Join gloo's threads, which would abort the exiting program; after an exception that could hang."""
    if distributed.is_initialized() and not hasattr(sys, "last_value"):
        distributed.destroy_process_group()


def _rank_device(device: str | torch.device, position: RankPosition) -> torch.device:
    devices = ("auto", "cpu", "cuda")
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device: {type_of(device)}, not one of {', '.join(devices)}")
    name, index = (device, None) if isinstance(device, str) else (device.type, device.index)
    if name not in devices:
        raise ConfigError([Problem.at("device", name, "no such device", f"use {', '.join(devices)}")])
    if name == "auto" and distributed.is_initialized():
        name = "cuda" if "nccl" in distributed.get_backend() else "cpu"
    local_device = rank_device(DistConfig(device=name), position)  # type: ignore[arg-type]
    if name == "cuda" and index not in (None, local_device.index):
        fix = "use device=cuda, and choose GPUs by CUDA_VISIBLE_DEVICES"
        raise ConfigError([Problem.at("device", str(device), f"this rank's is {local_device}", fix)])
    return local_device


def _rank_position() -> RankPosition:
    launched = read_rank_position(os.environ)
    if not distributed.is_initialized():
        return launched or ALONE
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if launched is not None and (launched.rank, launched.world_size) == (rank, size):
        return launched
    return RankPosition(rank, size, local_rank=rank, local_world_size=size, master_addr="", master_port=0)
