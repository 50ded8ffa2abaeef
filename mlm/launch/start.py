"""Starting a job on all its ranks: in this process, on this host, or as a rank of torchrun or SLURM."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlm.launch.agent import launch_ranks
from mlm.launch.config import DistConfig
from mlm.launch.environment import read_place
from mlm.launch.failure import INTERRUPTED
from mlm.launch.process import device_kind, run_joined, run_rank
from mlm.parallel.config import ParallelConfig
from mlm.util.errors import UserError


@dataclass(frozen=True)
class LaunchFacts:
    """Facts of the environment that a launch depends on, for checks before any process starts."""

    joined: bool
    """True if torchrun, SLURM or another launcher started this process as a rank."""
    world_size: int | None
    """Ranks the launcher started; None in a plain start."""
    local_devices: int | None
    """GPUs of this host; None on CPU."""


def launch_facts(dist: DistConfig) -> LaunchFacts:
    """Read the environment. Raises UserError for invalid variables, or CUDA without a GPU."""
    place = read_place(os.environ)
    return LaunchFacts(
        joined=place is not None,
        world_size=None if place is None else place.world_size,
        local_devices=torch.cuda.device_count() if device_kind(dist) == "cuda" else None,
    )


def run_job(target: str, config: Any, *, out: Path | None) -> int:
    """Run `module:function` as `run(config, ctx: ParallelContext)` on every rank; return the exit code.

    `config` is a dataclass with `parallel` and `dist`. 0: the function returned on all ranks. 2: a user's
    mistake on a rank, 1: any other failure, both already reported. 128 + n: stopped by signal n (130:
    Ctrl-C), also after a save; but 0 where a save before a time limit was requested (SIGUSR1), and for a
    rank of torchrun or SLURM that saved.

    With one rank, the function runs in this process and its exceptions pass through. Raises UserError for
    a layout that does not fit, a port in use, or an `out` that cannot be written.
    """
    facts = launch_facts(config.dist)
    world_size = choose_world_size(config.parallel, facts)
    if facts.joined:
        place = read_place(os.environ)
        assert place is not None
        return run_joined(target, config, place=place, out=out)
    try:
        if world_size > 1:
            return launch_ranks(target, config, out=out, world_size=world_size)
        return run_rank(target, config)
    except KeyboardInterrupt:
        return INTERRUPTED


def choose_world_size(parallel: ParallelConfig, facts: LaunchFacts) -> int:
    """Return the ranks of the job: tp * cp * pp * dp, where dp=null takes what launcher or GPUs leave.

    Raises UserError if the ranks that were started, or the GPUs of this host, do not fit.
    """
    replica, over_context = parallel.replica, f" * cp={parallel.cp}" if parallel.cp > 1 else ""
    named = f"tp={parallel.tp}{over_context} * pp={parallel.pp}"
    if facts.world_size is not None:
        left, rest = divmod(facts.world_size, replica)
        if rest:
            raise UserError(
                f"{named} = {replica} does not divide WORLD_SIZE={facts.world_size}: "
                f"start a multiple of {replica} ranks, or lower tp or pp"
            )
        if parallel.dp not in (None, left):
            raise UserError(
                f"{named} * dp={parallel.dp} = {replica * parallel.dp} ranks, but the launcher started "
                f"WORLD_SIZE={facts.world_size}: set dp={left}, or start {replica * parallel.dp} ranks"
            )
        return facts.world_size
    gpus = facts.local_devices
    dp = parallel.dp or (max(1, gpus // replica) if gpus is not None else 1)
    if gpus is not None and replica * dp > gpus:
        raise UserError(
            f"{named} * dp={dp} = {replica * dp} ranks need as many GPUs, but this host has {gpus}: "
            "lower tp, pp or dp, or start on more hosts with torchrun or SLURM"
        )
    return replica * dp
