"""Checks that need no other rank: memory, disk, limits, names and variables of the host, and the device."""

import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from mlm.launch.doctor.findings import CheckResult, check_result
from mlm.launch.environment import RankPosition
from mlm.launch.network import check_addresses
from mlm.util.errors import UserError
from mlm.util.system import available_cores
from mlm.util.terminal import format_bytes

MIB, GIB = 1 << 20, 1 << 30


def memory(available: int, ranks_here: int) -> CheckResult:
    """Judge the free memory of the host, which its ranks share; with less than 256 MiB none trains."""
    share = available // ranks_here
    text = f"{format_bytes(available)} free for {ranks_here} rank{'s' * (ranks_here > 1)}"
    remedy = "end other programs on this host, or start fewer ranks on it"
    return check_result("memory", text, remedy, fails=share < 256 * MIB, warns=share < 2 * GIB)


def disk(folder: Path) -> CheckResult:
    try:
        status = os.statvfs(folder)
    except OSError as error:
        remedy = "name an out on a disk that all hosts have"
        return CheckResult("disk", "fail", f"{folder}: {error.strerror}", remedy)
    if status.f_files and status.f_favail == 0:
        remedy = "delete files there, or name an out on another disk"
        return CheckResult("disk", "fail", f"no inodes left in {folder}", remedy)
    free = status.f_bavail * status.f_frsize
    remedy = "a checkpoint takes 12 bytes a parameter in float32 (`mlm plan memory`): free some space"
    if free < GIB:
        remedy = "free some space, or name an out on another disk"
    text = f"{format_bytes(free)} free in {folder}"
    return check_result("disk", text, remedy, fails=free < GIB, warns=free < 20 * GIB)


def open_files(world_size: int) -> CheckResult:
    """Judge the limit of open files: a rank needs a socket for each group and store of each other rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 256 + 4 * world_size
    text = f"{_limit(soft)} (hard limit {_limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= least:
        return CheckResult("ulimit -n", "ok", text)
    remedy = f"run `ulimit -n {least}` before the start, or raise nofile in limits.conf or the service"
    return CheckResult("ulimit -n", "fail", f"{text}, and {world_size} ranks need {least}", remedy)


def locked_memory(on_gpu: bool) -> CheckResult:
    """Judge the limit of locked memory, which InfiniBand and pinned buffers take."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not on_gpu or soft == resource.RLIM_INFINITY:
        return CheckResult("ulimit -l", "ok", _limit(soft, 1024))
    remedy = "set `ulimit -l unlimited` (LimitMEMLOCK=infinity of slurmd or the container)"
    return CheckResult("ulimit -l", "warn", f"{_limit(soft, 1024)} KiB, too little for InfiniBand", remedy)


def _limit(value: int, unit: int = 1) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // unit)


def shared_memory(on_gpu: bool) -> CheckResult:
    """Judge the size of /dev/shm, through which NCCL connects the ranks of a host."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        return CheckResult(
            "/dev/shm", "fail" if on_gpu else "warn", str(error.strerror), "mount a tmpfs there"
        )
    total, free = (count * status.f_frsize for count in (status.f_blocks, status.f_bavail))
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    remedy = "give the container more (docker run --shm-size=8g, an emptyDir with medium: Memory)"
    return check_result("/dev/shm", text, remedy, fails=free < 32 * MIB, warns=on_gpu and free < GIB)


def names(position: RankPosition | None, environ: Mapping[str, str]) -> CheckResult:
    """Judge whether this host resolves rank 0's address and its own; `position` is None for one rank."""
    host = socket.gethostname()
    try:
        if position is not None:
            check_addresses(position, environ, wait_s=0.0)
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except UserError as error:
        problem, _, remedy = str(error).partition("; ")
        return CheckResult("host names", "fail", problem, remedy)
    except OSError:
        remedy = f"add {host} to /etc/hosts or DNS"
        return CheckResult("host names", "warn", f"the name of this host, {host}, does not resolve", remedy)
    return CheckResult("host names", "ok", f"{host} is {address}")


HURTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("NCCL_DEBUG", ("INFO", "TRACE"), "writes at every communication; unset it, or set WARN"),
    ("NCCL_P2P_DISABLE", ("1",), "GPUs of a host do not reach each other directly; unset it"),
    ("NCCL_SHM_DISABLE", ("1",), "ranks of a host communicate over the network; unset it"),
    ("NCCL_IB_DISABLE", ("1",), "hosts communicate over TCP in place of InfiniBand; unset it"),
    ("NCCL_LAUNCH_MODE", ("GROUP",), "launches wait for each other; unset it"),
    ("TORCH_NCCL_BLOCKING_WAIT", ("1",), "the host waits for each communication; unset it"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), "a hang is never noticed; unset it"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every communication is checked by another; unset it"),
    ("CUDA_LAUNCH_BLOCKING", ("1",), "the host waits for every kernel; unset it"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", ("1",), "every tensor is allocated by the driver; unset it"),
    ("TORCH_SHOW_CPP_STACKTRACES", ("1",), "errors take seconds; unset it"),
)
"""Variables with the values that slow or break a run, and why."""


def environment(environ: Mapping[str, str], ranks_here: int) -> list[CheckResult]:
    findings = list[CheckResult]()
    for name, values, reason in HURTS:
        if environ.get(name, "").upper() in values:
            effect, _, remedy = reason.partition("; ")
            findings.append(CheckResult(name, "warn", f"{environ[name]}: {effect}", remedy))
    threads, cores = environ.get("OMP_NUM_THREADS", ""), available_cores()
    if threads.isdecimal() and int(threads) * ranks_here > cores:
        text = f"{threads} for each of {ranks_here} ranks on {cores} cores"
        share = cores // ranks_here
        remedy = f"set it to {share}" if share else f"start {cores} ranks or fewer on this host"
        findings.append(CheckResult("OMP_NUM_THREADS", "warn", text, remedy))
    return findings or [CheckResult("variables", "ok", "none that hurts")]


def check_device(device: torch.device) -> list[CheckResult]:
    if device.type != "cuda":
        return []
    free, total = torch.cuda.mem_get_info(device)
    text = f"{format_bytes(free)} of {format_bytes(total)} free"
    remedy = "end the programs that nvidia-smi lists on it, or choose GPUs by CUDA_VISIBLE_DEVICES"
    is_used = free < 0.9 * total  # by another program
    return [check_result("GPU memory", text, remedy, warns=is_used)]
