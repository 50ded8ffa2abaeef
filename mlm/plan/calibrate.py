"""`mlm plan calibrate`: measure this machine, or the cluster that it is launched on, for `hardware=`.

All ranks measure at once: the rate of matrix products, the bandwidth of memory, and the links within a node
and between nodes.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from statistics import median

import torch
import yaml  # type: ignore[import-untyped]

from mlm.checkpoint.native.exchange import Ranks
from mlm.launch.devices import device_kind
from mlm.launch.environment import read_rank_position
from mlm.launch.start import run_job
from mlm.optim.auto_precision import AMPERE
from mlm.optim.precision import DTYPES
from mlm.parallel.collectives import all_reduce, barrier
from mlm.parallel.config import ParallelConfig
from mlm.parallel.linear import linear
from mlm.parallel.mesh import ParallelContext
from mlm.plan.config import CalibrationJob, PlanCalibrateConfig
from mlm.plan.hardware import (
    GIB,
    GPU_RESERVED_GIB,
    EfficiencyConfig,
    HardwareConfig,
    PeakConfig,
    build_hardware,
    calibration_file,
    cpu_name,
    preset_of_gpu,
)
from mlm.tracking.peak import memory_bytes, table_peak
from mlm.training.memory import reuse_large_blocks
from mlm.util.files import write_atomic
from mlm.util.results import CALIBRATION_MARK, save_result
from mlm.util.system import available_cores, host_memory
from mlm.util.terminal import console

MOST_RANKS = 8
"""Most ranks on a CPU host without `ranks`."""
FIRST_STEP_GIB = 0.06
"""Memory that libraries take on a CPU when they are first used."""
REPEATS = 4
"""Fewest repetitions of a measurement; the shortest time counts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the measurements on one type of device."""

    formats: tuple[str, ...]
    """Number formats of products; the first is measured at all sizes."""
    products: tuple[tuple[int, int, int], ...]
    """[m, k] x [k, n], as in layers; the last one is measured in every format."""
    copy: int
    """Bytes."""
    messages: tuple[int, int]
    """Bytes of a small message, which shows the latency of a link, and of a large one, for its bandwidth."""
    least_s: float
    """Shortest duration of a measurement in seconds."""


WORKLOADS = {
    "cpu": Workload(
        formats=("fp32", "bf16", "fp64"),
        products=((512, 256, 256), (256, 256, 1024), (1024, 384, 1536), (512, 2048, 512), (512, 512, 2048)),
        copy=64 << 20,
        messages=(1 << 12, 1 << 24),
        least_s=0.1,
    ),
    "cuda": Workload(
        formats=("bf16", "fp16", "fp32", "fp64"),
        products=((2048, 2048, 2048), (8192, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 16384)),
        copy=1 << 30,
        messages=(1 << 16, 1 << 28),
        least_s=0.2,
    ),
}


def run(config: PlanCalibrateConfig) -> int:
    """Start the ranks, which measure, print and save the result; return the exit code.

    Raises UserError if a result cannot be written, or ranks cannot be started.
    """
    position = read_rank_position(os.environ)
    if position is not None:
        local = position.local_world_size
    elif device_kind(config.dist) == "cuda":
        local = config.ranks or max(1, torch.cuda.device_count())
    else:
        local = config.ranks or min(available_cores(), MOST_RANKS)
    hosts = 1 if position is None else position.world_size // position.local_world_size
    parallel = ParallelConfig(tp=local, dp=hosts)
    job = CalibrationJob(out=config.out, dist=config.dist, parallel=parallel)
    return run_job("mlm.plan.calibrate:on_rank", job, out=None)


def on_rank(config: CalibrationJob, ctx: ParallelContext, workload: Workload | None = None) -> None:
    """Measure, with all ranks together; the first prints and writes."""
    before = 0
    if ctx.device.type == "cpu":
        reuse_large_blocks()
        before = memory_bytes(ctx.device)
    workload = workload or WORKLOADS[ctx.device.type]
    measured = measure(ctx, workload)
    if not ctx.is_main:
        return
    # the form that `hardware=FILE.yaml` reads, without nulls
    hardware = asdict(hardware_of_this(ctx, workload, measured, before))
    values = {key: value for key, value in hardware.items() if value is not None}
    for section in ("peak_tflops", "efficiency"):
        values[section] = {key: value for key, value in values[section].items() if value is not None}
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = (
        f"{CALIBRATION_MARK.decode()}: {ctx.world_size} ranks on {ctx.dp.size} host(s), {when}\n"
        "# Measured are the rate of products, the memory's bandwidth and the links; a known GPU has its\n"
        "# datasheet's peaks. A device is one of the ranks, all of which were busy at once.\n"
    )
    body: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    content, out = (head + body).encode(), console()
    out.print(head + body)
    file = calibration_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, content)
    except OSError as error:
        out.print(f"not kept for hardware=this: {file}: {error.strerror}")
    else:
        out.print(f"kept for hardware=this in {file}")
    save_result(config.out, content, out.print)


def measure(ctx: ParallelContext, workload: Workload) -> dict[str, float]:
    """Measure on all ranks; return the medians over ranks, on every rank.

    FLOP/s by number format, and as "products" at usual sizes; bytes/s of "memory"; for "node" and "network",
    unless they have one rank, bytes/s and as "node_latency" seconds.
    """
    formats, device = workload.formats, ctx.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < AMPERE:
        formats = formats[1:]  # it has no units for bf16
    rates = [product_rate(ctx, formats[0], size, workload) for size in workload.products]
    measured = {"products": median(rates), formats[0]: max(rates)}
    measured |= {name: product_rate(ctx, name, workload.products[-1], workload) for name in formats[1:]}
    source = torch.zeros(workload.copy // 4, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    measured["memory"] = 2 * workload.copy / best_time(copy, ctx, workload.least_s)
    for name, axis in (("node", ctx.tp), ("network", ctx.dp)):
        if axis.size > 1:
            # An all-reduce over k ranks sends 2 log2(k) messages in turn, 2 (k - 1)/k of its bytes.
            sizes = workload.messages
            small, large = (
                best_time(partial(all_reduce, torch.zeros(size // 4, device=device), axis), ctx, 0.0, True)
                for size in sizes
            )
            measured[f"{name}_latency"] = small / (2 * math.ceil(math.log2(axis.size)))
            sent = 2 * (axis.size - 1) / axis.size * (sizes[1] - sizes[0])
            measured[name] = sent / max(large - small, 1e-9)
    columns = zip(*Ranks.of(ctx).all_gather(list(measured.values())), strict=True)
    return {name: median(column) for name, column in zip(measured, columns, strict=True)}


def product_rate(ctx: ParallelContext, dtype: str, size: tuple[int, int, int], workload: Workload) -> float:
    """Measure FLOP/s of a linear layer [m, k] x [k, n]: forward pass and both gradients."""
    m, k, n = size
    x, w, dy = (torch.randn(*s, device=ctx.device).to(DTYPES[dtype]) for s in ((m, k), (n, k), (m, n)))
    x.requires_grad_()
    w.requires_grad_()

    def both_passes() -> None:
        x.grad = w.grad = None
        linear(x, w).backward(dy)

    return 6 * m * k * n / best_time(both_passes, ctx, workload.least_s)


def best_time(
    work: Callable[[], object], ctx: ParallelContext, least_s: float, is_collective: bool = False
) -> float:
    """Return the shortest time of several repetitions, in seconds. Collective over all ranks."""
    device = ctx.device
    # process_time excludes other programs on the core, but also the wait for other ranks.
    is_local = device.type == "cpu" and torch.get_num_threads() == 1 and not is_collective
    clock = time.process_time if is_local else time.perf_counter
    work()  # loads libraries and allocates memory
    barrier(ctx.world)  # all ranks measure at once
    times = list[float]()
    while len(times) < REPEATS or sum(times) < least_s:
        if is_collective:
            barrier(ctx.world)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - begin)
    return min(times)


def hardware_of_this(
    ctx: ParallelContext, workload: Workload, measured: dict[str, float], before: int
) -> HardwareConfig:
    """Return this machine's hardware; `before` is a CPU process's memory in bytes before it measured.

    A known GPU has the peaks of its datasheet.
    """
    ranks, is_cpu, formats = ctx.tp.size, ctx.device.type == "cpu", PeakConfig.__slots__
    peaks = {name: rate / 1e12 for name, rate in measured.items() if name in formats}
    if is_cpu:
        name, memory = cpu_name(), host_memory() / ranks
        reserved = round_figures(before / GIB + FIRST_STEP_GIB)
    else:
        name = torch.cuda.get_device_name(ctx.device)
        memory, preset = torch.cuda.get_device_properties(ctx.device).total_memory, preset_of_gpu(name)
        reserved = GPU_RESERVED_GIB if preset is None else preset.reserved_gib
    main = next(iter(peaks))
    if not is_cpu:
        peaks |= {key: peak.flops / 1e12 for key in formats if (peak := table_peak(name, key))}
    links = dict[str, float]()
    for link, axis in (("node", "node"), ("network", "network" if "network" in measured else "node")):
        if axis in measured:
            links[f"{link}_gbps"] = round_figures(measured[axis] / 1e9)
            links[f"{link}_latency_us"] = round_figures(measured[f"{axis}_latency"] * 1e6)
    return build_hardware(
        name=name,
        device="cpu" if is_cpu else "gpu",
        devices_per_node=ranks,
        memory_gib=round_figures(memory / GIB, 4),
        reserved_gib=reserved,
        memory_gbps=round_figures(measured["memory"] / 1e9),
        **links,
        network_is_assumed="network" not in measured,
        peak_tflops=PeakConfig(**{key: round_figures(peak) for key, peak in peaks.items()}),
        efficiency=EfficiencyConfig(
            matmul=round_figures(min(measured["products"] / 1e12 / peaks[main], 1.0)),
            matmul_half=0.0,  # the median over usual sizes holds for all sizes
            attention=0.33,  # share of the products' rate that fused kernels reach, forward and backward
            memory=1.0,
            network=1.0,
        ),
    )


def round_figures(value: float, digits: int = 3) -> float:
    """Round a number to `digits` significant figures."""
    return float(f"{value:.{digits}g}")
