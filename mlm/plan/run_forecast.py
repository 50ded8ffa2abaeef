"""Memory and speed of a pretraining run by the plan's models, as a line; a warning if it does not fit."""

import os
import subprocess
from dataclasses import dataclass, replace

from mlm.launch.devices import device_kind
from mlm.launch.environment import read_rank_position
from mlm.plan.candidates import Query
from mlm.plan.hardware import (
    CPU_RESERVED_GIB,
    GIB,
    GPU_RESERVED_GIB,
    HardwareConfig,
    build_hardware,
    gib,
    preset_of_gpu,
    read_calibration,
)
from mlm.plan.layout import PlannedLayout
from mlm.plan.report import Row, as_row, format_range, format_seconds, time_range
from mlm.plan.search import Forecaster
from mlm.runs.config import PretrainConfig
from mlm.util.system import host_memory

GPU_QUERY = ("nvidia-smi", "--id=0", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
"""Name and MiB of the host's first GPU, without the context that torch would open."""


@dataclass(frozen=True, slots=True)
class Forecast:
    query: Query
    layout: PlannedLayout
    memory: float
    """Bytes of the fullest rank."""
    row: Row | None
    """Row of `mlm plan layouts`; None if the hardware's peaks are unknown."""


def forecast(config: PretrainConfig, ranks: int, hardware: HardwareConfig | None = None) -> Forecast:
    """Forecast a run on `ranks` ranks, by default of this host's hardware. Raises OSError and UserError."""
    if hardware is None:
        position = read_rank_position(os.environ)
        hardware = hardware_here(config, position.local_world_size if position else ranks)
    layout = PlannedLayout.of(config, ranks // config.parallel.replica)
    forecaster = Forecaster(query := Query(run=config, hardware=hardware, gpus=ranks))
    is_known = getattr(hardware.peak_tflops, config.precision.dtype) is not None
    row = as_row(query, forecaster.forecast(layout)) if is_known else None
    return Forecast(query, layout, forecaster.memory.worst(layout).total, row)


def hardware_here(config: PretrainConfig, local_ranks: int) -> HardwareConfig:
    """Return this host's calibrated hardware, else its GPU's preset, else its memory without rates.

    A calibration does not hold for more ranks on a CPU than it measured. Raises OSError.
    """
    measured, is_cpu = read_calibration(), device_kind(config.dist) == "cpu"
    hardware: HardwareConfig | None = None
    if is_cpu:
        memory = host_memory() / local_ranks / GIB
        if measured is not None and measured.device == "cpu" and local_ranks <= measured.devices_per_node:
            hardware = measured.for_ranks(local_ranks)
    else:
        answer = subprocess.run(GPU_QUERY, capture_output=True, text=True, check=True, timeout=10).stdout
        name, mib = answer.strip().rsplit(", ", 1)
        memory = float(mib) / 1024
        hardware = measured if measured is not None and measured.device == "gpu" else preset_of_gpu(name)
    if hardware is not None:
        return replace(hardware, memory_gib=memory)
    device, reserved = ("cpu", CPU_RESERVED_GIB) if is_cpu else ("gpu", GPU_RESERVED_GIB)
    blank = {"name": "this machine", "device": device, "devices_per_node": 1}
    return build_hardware(**blank, memory_gib=memory, reserved_gib=reserved)


def summary(run: Forecast) -> list[str]:
    """Return `needs 61.0 GiB of 79.2 GiB per GPU; 41% MFU expected (DGX A100 80GB)`, and a warning."""
    hardware, capacity, ranks = run.query.hardware, run.query.memory_bytes, run.layout.gpus
    if hardware.device == "cpu":
        local = round(host_memory() / capacity)
        need = f"{local} ranks need {gib(run.memory)} each" if local > 1 else f"needs {gib(run.memory)}"
        words = f"{need}; this host has {gib(host_memory())}"
    else:
        words = f"needs {gib(run.memory)} of {gib(capacity)} per GPU"
    if row := run.row:
        name = f"{hardware.name}, {ranks} ranks" if ranks > 1 else hardware.name
        (low, high), assumptions = time_range(hardware, run.query.run.model, ranks)
        step = format_range(row["step_low_s"], row["step_high_s"], format_seconds)
        mfu = format_range(row["mfu"] / high, row["mfu"] / low, "{:.0%}".format)
        words += f"; {step} a step and {mfu} MFU expected ({'; '.join([name, *assumptions])})"
    if run.memory <= capacity:
        return [words]
    command = f"`mlm plan layouts gpus={ranks}` finds layouts that fit"
    return [words, f"warning: {gib(run.memory - capacity)} may be lacking; {command}"]
