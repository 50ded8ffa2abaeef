"""`mlm plan calibrate`: measure this machine, or the cluster that it is launched on, for `hardware=`."""

import os
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from statistics import median

import torch
import yaml  # type: ignore[import-untyped]

from mlm.checkpoint.native.exchange import Ranks
from mlm.launch.devices import device_kind
from mlm.launch.environment import read_rank_place
from mlm.launch.start import run_job
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.plan.calibrate_fit import Timing, figures, fit, implausible
from mlm.plan.calibrate_measure import Measurements, Workload
from mlm.plan.config import CalibrationJob, Format, PlanCalibrateConfig
from mlm.plan.hardware import (
    HardwareConfig,
    PeakConfig,
    calibration_file,
    cpu_name,
    preset_of_gpu,
    unmeasured,
)
from mlm.plan.layer_counts import counts_of
from mlm.plan.memory import GIB
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


def run(config: PlanCalibrateConfig) -> int:
    """Measure on all ranks, print and keep the result, and return the exit code.

    Raises UserError if a result cannot be written, or ranks cannot be started.
    """
    place = read_rank_place(os.environ)
    local = config.ranks or default_ranks(config) if place is None else place.local_world_size
    hosts = 1 if place is None else place.world_size // place.local_world_size
    if place is not None and place.world_size % place.local_world_size:
        raise UserError(
            f"{place.world_size} ranks were started, {place.local_world_size} of them here; start equally "
            "many on each host"
        )
    typed = {field.name: getattr(config, field.name) for field in fields(config)}
    job = CalibrationJob(**typed, parallel=ParallelConfig(tp=local, dp=hosts))
    return run_job("mlm.plan.calibrate:on_rank", job, out=None)


def default_ranks(config: PlanCalibrateConfig) -> int:
    """Ranks of a plain start: each GPU, or each core of a CPU host."""
    if device_kind(config.dist) == "cuda":
        return max(1, torch.cuda.device_count())
    return min(len(os.sched_getaffinity(0)), MOST_RANKS)


def on_rank(config: CalibrationJob, ctx: ParallelContext, workload: Workload | None = None) -> None:
    """Measure; the first rank fits, prints and writes. Every rank calls this. Raises UserError."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    dtype: Format = config.dtype or ("bf16" if ctx.device.type == "cuda" else "fp32")
    base = memory_bytes(ctx.device) if ctx.device.type == "cpu" else 0
    measurements = Measurements(ctx, dtype, workload)
    timings = measure(ctx, measurements, config.max_waiting)
    device = "cpu" if ctx.device.type == "cpu" else "gpu"
    counts = counts_of(measurements.run_of(1, 1), device)
    hardware = fit(timings, counts, blank(config.name, ctx, base), dtype)
    if workload is None and (low := implausible(hardware)):
        raise UserError(
            f"measured {', '.join(low)}, which no working machine has: end other programs and start again"
        )
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


def blank(name: str | None, ctx: ParallelContext, base: int) -> HardwareConfig:
    """The devices' names, numbers and memory, and of a known GPU the peaks; all else is to be measured."""
    if ctx.device.type == "cpu":
        memory, reserved = host_memory() / GIB / ctx.tp.size, figures(base / GIB + FIRST_STEP)
        return unmeasured(name or cpu_name(), "cpu", ctx.tp.size, figures(memory, 4), reserved)
    gpu = torch.cuda.get_device_name(ctx.device)
    known = preset_of_gpu(gpu)
    memory = torch.cuda.get_device_properties(ctx.device).total_memory / GIB
    reserved = RESERVED if known is None else known.reserved_gib
    hardware = unmeasured(name or gpu, "gpu", ctx.tp.size, figures(memory, 4), reserved)
    peaks = {unit: found.flops / 1e12 for unit in PeakConfig.__slots__ if (found := table_peak(gpu, unit))}
    power = None if known is None else known.power_w
    return replace(hardware, power_w=power, peak_tflops=PeakConfig(**peaks))


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
