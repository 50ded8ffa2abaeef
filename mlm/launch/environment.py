"""A rank's position from the variables of torchrun or SLURM, and the variables of a launched rank.

Pure functions of an environment; none reads or sets `os.environ`.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlm.launch.stop import LAUNCHED
from mlm.util.errors import UserError

THREADS = "OMP_NUM_THREADS"
LISTENER = "MLM_LISTENER"
"""Environment variable of a launched rank 0: the open socket on which it serves the rendezvous."""
FIRST_PORT, PORTS = 12_000, 20_000  # below the range from which Linux assigns ports to any process


@dataclass(frozen=True)
class RankPosition:
    """Global and local rank, and the address of the rendezvous."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    cores: int | None = None
    """CPU cores assigned to this rank alone; None if ranks share the host's."""
    nodes: str = ""
    """SLURM's list of nodes where `master_addr` is the first of them; empty where it was set."""
    variables: tuple[str, str] = field(default=("RANK", "WORLD_SIZE"), compare=False)
    """The variables of `rank` and `world_size`."""
    job: str = ""
    """SLURM's job and step, which tell apart jobs on one port; empty without SLURM."""


def by_torchrun(environ: Mapping[str, str]) -> bool:
    """True if torchrun, or a launcher with the same variables, started this process as a rank."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def by_srun(environ: Mapping[str, str]) -> bool:
    """True if `srun` started this process as one of several tasks.

    A batch script and an interactive shell hold the allocation's variables too, but are not ranks. Nor is the
    first task of `srun --pty`: ranks started from its shell inherit its variables, but not its terminal.
    """
    shells = ("interactive", "bash", "sh", "zsh")
    if "SLURM_PTY_PORT" in environ or environ.get("SLURM_JOB_NAME") in shells:
        with suppress(OSError):  # no terminal controls this process
            os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
            return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    # SLURM numbers the batch script, `salloc` shells and the like from 0xFFFFFFF0 on
    in_step = step.isdecimal() and int(step) < 0xFFFFFFF0
    return in_step and "SLURM_PROCID" in environ and _number(environ, _slurm_tasks_key(environ), 1) > 1


def read_rank_position(environ: Mapping[str, str]) -> RankPosition | None:
    """Return this process's position; None if no launcher started it as a rank.

    Raises UserError for a missing or invalid variable.
    """
    if by_torchrun(environ):
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        position = RankPosition(
            rank=rank,
            world_size=world_size,
            local_rank=_number(environ, "LOCAL_RANK", rank),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", world_size),
            master_addr=_text(environ, "MASTER_ADDR"),
            master_port=_number(environ, "MASTER_PORT"),
        )
        return _check_position(position, "LOCAL_WORLD_SIZE")
    if not by_srun(environ):
        return None
    tasks = _slurm_tasks_key(environ)
    # tasks by host, such as `8(x63),4`
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(times or 1)
    tasks_here = counts[min(_number(environ, "SLURM_NODEID", 0), len(counts) - 1)] if counts else 1
    nodes = environ.get("SLURM_STEP_NODELIST") or _text(environ, "SLURM_JOB_NODELIST")
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID", 0)
    position = RankPosition(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=_number(environ, tasks, 1),
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=tasks_here,
        master_addr=environ.get("MASTER_ADDR") or first_host(nodes),
        # Equal on all ranks without communication, and different for jobs that share a host.
        master_port=_number(environ, "MASTER_PORT", FIRST_PORT + (job + 101 * step) % PORTS),
        cores=_number(environ, "SLURM_CPUS_PER_TASK", 0) or None,
        nodes="" if environ.get("MASTER_ADDR") else nodes,
        variables=("SLURM_PROCID", tasks),
        job=f"{job}.{step}",
    )
    return _check_position(position, "SLURM_TASKS_PER_NODE")


def _check_position(position: RankPosition, local_world_size: str) -> RankPosition:
    """Return a valid position; `local_world_size` names its variable. Raises UserError."""
    rank, world_size = position.variables
    if position.rank >= position.world_size:
        raise UserError(
            f"{rank}={position.rank} in the environment is not below {world_size}={position.world_size}: "
            "correct or unset them"
        )
    if position.local_world_size < 1:
        raise UserError(f"{local_world_size}={position.local_world_size} in the environment: use 1 or more")
    if not 0 < position.master_port < 65536:
        raise UserError(f"MASTER_PORT={position.master_port} in the environment: use 1 to 65535")
    return position


def position_variables(position: RankPosition) -> dict[str, str]:
    """Return the variables that torch's `env://` rendezvous and other libraries read."""
    return {
        "RANK": str(position.rank),
        "WORLD_SIZE": str(position.world_size),
        "LOCAL_RANK": str(position.local_rank),
        "LOCAL_WORLD_SIZE": str(position.local_world_size),
        "MASTER_ADDR": position.master_addr,
        "MASTER_PORT": str(position.master_port),
    }


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: `node[007-009,12],gpu3` begins with `node007`."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if match is None:
        raise UserError(f"SLURM_JOB_NODELIST={nodelist!r} names no host: set MASTER_ADDR to the first one")
    return re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", match.group())


def num_threads(threads: int | None, environ: Mapping[str, str], *, cores: int, local_ranks: int) -> int:
    """Return the CPU threads of a rank: `threads`, OMP_NUM_THREADS, or an equal share of the host's cores."""
    variable, is_torchruns = environ.get(THREADS, ""), by_torchrun(environ) and LAUNCHED not in environ
    is_number = variable.isdecimal() and len(variable) < 5  # libraries ignore larger numbers
    # Ignore torchrun's default of 1.
    return threads or (is_number and not is_torchruns and int(variable)) or max(1, cores // local_ranks)


def worker_environment(base: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """Return the variables that a launched rank gets in addition to `base`, the command's environment.

    Sets OMP_NUM_THREADS to `threads` (`num_threads`), and overrides no other variable of the user.
    """
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # as torchrun: a failed collective ends its rank
    if any(name == "lo" for _, name in socket.if_nameindex()):
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # one host: works whatever its name resolves to
    unset = {key: value for key, value in variables.items() if key not in base}
    return unset | {"PYTHONPATH": import_path(), LAUNCHED: "1", THREADS: str(threads)}


def import_path() -> str:
    """Return the command's import path as PYTHONPATH for its ranks, which run with `python -P`."""
    return ":".join(str(Path(entry).resolve()) if entry else str(Path.cwd()) for entry in sys.path)


def _slurm_tasks_key(environ: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _text(environ: Mapping[str, str], key: str) -> str:
    value = environ.get(key)
    if not value:
        raise UserError(
            f"{key} is not set, but this process was started as one of several ranks: set it, or start with "
            "torchrun or srun (for a plain start on this host, unset RANK and WORLD_SIZE)"
        )
    return value


def _number(environ: Mapping[str, str], key: str, default: int | None = None) -> int:
    if default is not None and not environ.get(key):
        return default
    value = _text(environ, key)
    if not value.isdecimal():
        raise UserError(f"{key}={value} in the environment is not a whole number: correct or unset it")
    return int(value)
