"""`mlm plan calibrate`: measure this machine, or the cluster that it is launched on, for `hardware=`.

Each constant is what its equation in cost.py gives the measured times with the least relative error.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from mlm.checkpoint.native.exchange import Ranks
from mlm.launch.devices import device_kind
from mlm.launch.environment import read_rank_place
from mlm.launch.start import run_job
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.plan.calibrate_measure import Measurements, Timing, Workload
from mlm.plan.config import CalibrationJob, PlanCalibrateConfig
from mlm.plan.cost import CostModel
from mlm.plan.dry_run_meter import BACKWARD, FORWARD
from mlm.plan.hardware import (
    GIB,
    EfficiencyConfig,
    HardwareConfig,
    PeakConfig,
    calibration_file,
    cpu_name,
    preset_of_gpu,
    unmeasured,
)
from mlm.plan.layer_counts import LayerCounts, counts_of
from mlm.plan.layout import PlannedLayout
from mlm.tracking.peak import memory_bytes, table_peak
from mlm.training.memory import reuse_large_blocks
from mlm.util.errors import UserError
from mlm.util.files import write_atomic
from mlm.util.results import CALIBRATION_MARK, save_result
from mlm.util.system import host_memory
from mlm.util.terminal import console, progress_bar

MOST_RANKS = 8
"""Ranks that are started on a CPU host without `ranks`."""
RESERVED = 1.5
"""GiB that driver and libraries take on a GPU without a preset."""
FIRST_STEP = 0.06
"""GiB that libraries take on a CPU when they are first used."""
HEAD = """{mark}: {ranks} ranks on {hosts} host(s), {when}
# Every number is a measurement, but for memory and, where the GPU is known, the peaks of its datasheet.
# A device is one of the ranks, all of which were busy at once. The guide Planning explains the constants.
"""
HALVES = (0, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
"""Values of `matmul_half` that are tried."""
LEAST_REMAINDER = 0.02
"""Least share of a layer's time that kernels which are no products are given."""


def run(config: PlanCalibrateConfig) -> int:
    """Measure on all ranks, print and keep the result, and return the exit code.

    Raises UserError if a result cannot be written, or ranks cannot be started.
    """
    place = read_rank_place(os.environ)
    if place is not None:
        local = place.local_world_size
    elif device_kind(config.dist) == "cuda":
        local = config.ranks or max(1, torch.cuda.device_count())
    else:
        local = config.ranks or min(len(os.sched_getaffinity(0)), MOST_RANKS)
    hosts = 1 if place is None else place.world_size // place.local_world_size
    parallel = ParallelConfig(tp=local, dp=hosts)
    job = CalibrationJob(out=config.out, max_waiting=config.max_waiting, dist=config.dist, parallel=parallel)
    return run_job("mlm.plan.calibrate:on_rank", job, out=None)


def on_rank(config: CalibrationJob, ctx: ParallelContext, workload: Workload | None = None) -> None:
    """Measure; the first rank fits, prints and writes. Every rank calls this. Raises UserError."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    base = memory_bytes(ctx.device) if ctx.device.type == "cpu" else 0
    measurements = Measurements(ctx, workload)
    timings = measure(ctx, measurements, config.max_waiting)
    device = "cpu" if ctx.device.type == "cpu" else "gpu"
    counts = counts_of(measurements.run_of(1, 1), device)
    hardware = fit(timings, counts, blank(ctx, base), measurements.dtype)
    if ctx.is_main:
        write(hardware, config, ctx)


def measure(ctx: ParallelContext, measurements: Measurements, most: float) -> list[Timing]:
    """The medians of all ranks, on every rank. Raises UserError if other programs took the processors."""
    with progress_bar("measuring", len(measurements.tasks), shown=ctx.is_main) as advance:
        timings, waiting = measurements.run(advance)
    each = Ranks.of(ctx).all_gather([waiting, *(timing.seconds for timing in timings)])
    waits, *columns = zip(*each, strict=True)
    if max(waits) > most:
        raise UserError(
            f"max_waiting={most:g}: other programs had the processors for {max(waits):.0%} of the time, so "
            "that nothing measured is this machine's own; end them and start again, or start fewer ranks"
        )
    return [one._replace(seconds=median(its)) for one, its in zip(timings, columns, strict=True)]


def blank(ctx: ParallelContext, base: int) -> HardwareConfig:
    """The devices' names, numbers and memory, and of a known GPU the peaks; all else is to be measured."""
    ranks, peaks = ctx.tp.size, dict[str, float]()
    if ctx.device.type == "cpu":
        name, memory, reserved = cpu_name(), host_memory() / ranks, figures(base / GIB + FIRST_STEP)
    else:
        name = torch.cuda.get_device_name(ctx.device)
        memory, known = torch.cuda.get_device_properties(ctx.device).total_memory, preset_of_gpu(name)
        reserved = RESERVED if known is None else known.reserved_gib
        peaks = {n: found.flops / 1e12 for n in PeakConfig.__slots__ if (found := table_peak(name, n))}
    return unmeasured(
        name=name,
        device="cpu" if ctx.device.type == "cpu" else "gpu",
        devices_per_node=ranks,
        memory_gib=figures(memory / GIB, 4),
        reserved_gib=reserved,
        peak_tflops=PeakConfig(**peaks),
    )


def write(hardware: HardwareConfig, config: CalibrationJob, ctx: ParallelContext) -> None:
    """Print the result, keep it for `hardware=this`, and write `out` if given. Raises UserError."""
    content, out = as_yaml(hardware, ctx.world_size, ctx.dp.size), console()
    out.print(content.decode())
    kept = calibration_file()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, content)
    except OSError as error:
        out.print(f"not kept for hardware=this: {kept}: {error.strerror}")
    else:
        out.print(f"kept for hardware=this in {kept}")
    save_result(config.out, content, out.print)


def as_yaml(hardware: HardwareConfig, ranks: int, hosts: int) -> bytes:
    """The hardware as `hardware=FILE.yaml` reads it; what is unknown is left out."""
    values = {key: value for key, value in asdict(hardware).items() if value is not None}
    for section in ("peak_tflops", "efficiency"):
        values[section] = {key: value for key, value in values[section].items() if value is not None}
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = HEAD.format(mark=CALIBRATION_MARK.decode(), ranks=ranks, hosts=hosts, when=when)
    body: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return (head + body).encode()


def of_kind(timings: Sequence[Timing], kind: str) -> list[Timing]:
    """Return the measurements of a kind."""
    return [timing for timing in timings if timing.kind == kind]


def fit(timings: Sequence[Timing], counts: LayerCounts, blank: HardwareConfig, dtype: str) -> HardwareConfig:
    """`blank` with all that was measured; `counts` are those of the layer that was timed.

    A peak that `blank` has already, from a datasheet, stays.
    """
    given = {n: v for n in PeakConfig.__slots__ if (v := getattr(blank.peak_tflops, n)) is not None}
    products = of_kind(timings, "product")
    own = [product for product in products if product.name == dtype]
    peak, matmul, half = fit_products(own, given.get(dtype, 0.0) * 1e12)
    peaks = {product.name: product.rate / 1e12 for product in products} | {dtype: peak / 1e12}
    (copy,) = of_kind(timings, "copy")
    # causal attention is seven products, of which half is masked
    sizes = [(each.seconds, *each.sizes) for each in of_kind(timings, "fused")]
    attention = [3.5 * 2 * batch * seq**2 * width / seconds for seconds, batch, seq, width in sizes]
    efficiency = EfficiencyConfig(
        matmul=figures(matmul),
        matmul_half=half,
        matmul_least=min(min(product.sizes) for product in own),
        matmul_most=max(max(product.sizes) for product in own),
        attention=figures(min(median(attention) / peak, 1.0)),
        memory=1.0,
        network=1.0,
    )
    fitted = replace(
        blank,
        memory_gbps=figures(copy.rate / 1e9),
        peak_tflops=PeakConfig(**{n: figures(v) for n, v in {**peaks, **given}.items()}),
        efficiency=efficiency,
    )
    within, across = of_kind(timings, "within"), of_kind(timings, "across")
    links: dict[str, Any] = {"network_is_assumed": not across}
    for name, messages in (("node", within), ("network", across or within)):
        if messages:
            latency, rate = fit_link(messages)
            links |= {f"{name}_gbps": figures(rate / 1e9), f"{name}_latency_us": figures(latency * 1e6)}
    return fit_kernels(timings, counts, replace(fitted, **links))


def fit_products(products: Sequence[Timing], known: float | None) -> tuple[float, float, float]:
    """Peak in FLOP/s (`known`, or the highest rate), share of it that large products reach, and its half."""
    best = (math.inf, 0.0, 0.0)
    for tried in HALVES:
        logs = [math.log(p.rate * math.prod((x + tried) / x for x in p.sizes)) for p in products]
        spread = fmean((log - fmean(logs)) ** 2 for log in logs)
        best = min(best, (spread, math.exp(fmean(logs)), float(tried)))
    _, limit, half = best
    peak = known or max(limit, *(p.rate for p in products))
    return peak, min(limit / peak, 1.0), half


def fit_link(messages: Sequence[Timing]) -> tuple[float, float]:
    """Latency in seconds and bytes/s of the least squared relative error."""
    rows = [(a / m.seconds, b / m.seconds) for m in messages for a, b in [m.passes]]
    aa, ab, bb = (sum(x) for x in zip(*((a * a, a * b, b * b) for a, b in rows), strict=True))
    one, two = (math.fsum(x) for x in zip(*rows, strict=True))
    latency: float = 0.0
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        latency = max((one * bb - two * ab) / determinant, 0.0)
    per_byte = (two - latency * ab) / bb
    if per_byte <= 0:  # no message was large enough to show it
        per_byte = min(m.seconds / m.passes[1] for m in messages)
        latency = 0.0
    return latency, 1 / per_byte


def fit_kernels(timings: Sequence[Timing], counts: LayerCounts, hardware: HardwareConfig) -> HardwareConfig:
    """With the share of the memory bandwidth that kernels reach, and the least time of one.

    They are what a layer takes beyond its products and attention, on a micro-batch of each of two sizes.
    """
    measured = {timing.sizes[0]: timing.seconds for timing in of_kind(timings, "layer")}
    model, rows = CostModel(counts, replace(hardware, kernel_us=0.0), 1), []
    fused, of_one = model.software.compiled, counts.counts(ParallelConfig()).passes
    for size, seconds in measured.items():
        time = model.homes(PlannedLayout(micro_batch=size))["0"]
        works = [[each.work[phase, "0"] for phase in (FORWARD, BACKWARD)] for each in of_one]
        moved = [sum(w.fused_bytes if fused else w.eager_bytes for w in each) for each in works]
        size_moved = moved[0] + (size - 1) * (moved[1] - moved[0])
        explained = sum(time.forward[:2]) + sum(time.backward[:2])
        kernels = 0 if fused else sum(w.kernels for w in works[0])
        rows.append((max(seconds - explained, LEAST_REMAINDER * seconds), size_moved, kernels))
    (small, small_bytes, kernels), (large, large_bytes, _) = sorted(rows)
    rate = (large_bytes - small_bytes) / max(large - small, 1e-9)
    rate = min(max(rate, small_bytes / small), hardware.memory_gbps * 1e9)
    left = max(small - small_bytes / rate, 0.0) / kernels if kernels else 0.0
    share = rate / (hardware.memory_gbps * 1e9)
    efficiency = replace(hardware.efficiency, memory=figures(share))
    return replace(hardware, efficiency=efficiency, kernel_us=figures(left * 1e6))


def figures(value: float, digits: int = 3) -> float:
    """A number rounded to some significant figures."""
    return float(f"{value:.{digits}g}")
