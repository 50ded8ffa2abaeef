"""Needs and expected speed of a pretraining run by the plan's models: a line, a warning if it does not fit.

Nothing is rejected on an estimate.
"""

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
    calibrated,
    gib,
    preset_of_gpu,
    unmeasured,
)
from mlm.plan.layout import PlannedLayout
from mlm.plan.report import Row, as_row, format_seconds, spread, time_range
from mlm.plan.search import Models
from mlm.runs.config import PretrainConfig
from mlm.util.system import host_memory

GPU_QUERY = ("nvidia-smi", "--id=0", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
"""Name and MiB of the host's first GPU; torch would open a context."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A run's predicted numbers."""

    query: Query
    """Its hardware has the memory that was found; its peaks are null where its speed is not known."""
    layout: PlannedLayout
    memory: float
    """Bytes of the fullest rank."""
    row: Row | None
    """Its numbers as `mlm plan layouts` has them; None where the hardware's speed is unknown."""


def forecast(config: PretrainConfig, ranks: int, hardware: HardwareConfig | None = None) -> Forecast:
    """The forecast of a run on so many ranks, of this host if no hardware is given.

    Raises OSError and UserError.
    """
    if hardware is None:
        place = read_rank_position(os.environ)
        hardware = hardware_here(config, place.local_world_size if place else ranks)
    layout = PlannedLayout.of(config, ranks // config.parallel.replica)
    models = Models(query := Query(run=config, hardware=hardware, gpus=ranks))
    is_known = getattr(hardware.peak_tflops, config.precision.dtype) is not None
    row = as_row(query, models.forecast(layout)) if is_known else None
    return Forecast(query, layout, models.memory.worst(layout).total, row)


def hardware_here(config: PretrainConfig, local_ranks: int) -> HardwareConfig:
    """This host's hardware: as it was calibrated, by the preset of its GPU, or its memory alone.

    So too where more ranks share a CPU than were measured. Raises OSError.
    """
    own, is_cpu = calibrated(), device_kind(config.dist) == "cpu"
    if is_cpu:
        memory = host_memory() / local_ranks / GIB
        fits = own is not None and own.device == "cpu" and local_ranks <= own.devices_per_node
        known = own.for_ranks(local_ranks) if own is not None and fits else None
    else:
        answer = subprocess.run(GPU_QUERY, capture_output=True, text=True, check=True, timeout=10).stdout
        name, mib = answer.strip().rsplit(", ", 1)
        memory = float(mib) / 1024
        known = own if own is not None and own.device == "gpu" else preset_of_gpu(name)
    if known is not None:
        return replace(known, memory_gib=memory)
    device, reserved = ("cpu", CPU_RESERVED_GIB) if is_cpu else ("gpu", GPU_RESERVED_GIB)
    blank = {"name": "this machine", "device": device, "devices_per_node": 1}
    return unmeasured(**blank, memory_gib=memory, reserved_gib=reserved)


def summary(run: Forecast) -> list[str]:
    """`needs 61.0 GiB of 79.2 GiB per GPU; 41% MFU expected (DGX A100 80GB)`, and a warning if they lack."""
    hardware, capacity, ranks = run.query.hardware, run.query.memory_bytes, run.layout.gpus
    if hardware.device == "cpu":
        local = round(host_memory() / capacity)
        need = f"{local} ranks need {gib(run.memory)} each" if local > 1 else f"needs {gib(run.memory)}"
        words = f"{need}; this host has {gib(host_memory())}"
    else:
        words = f"needs {gib(run.memory)} of {gib(capacity)} per GPU"
    if row := run.row:
        name = f"{hardware.name}, {ranks} ranks" if ranks > 1 else hardware.name
        (low, high), rests = time_range(hardware, run.query.run.model, ranks)
        step = spread(row["step_low_s"], row["step_high_s"], format_seconds)
        mfu = spread(row["mfu"] / high, row["mfu"] / low, "{:.0%}".format)
        words += f"; {step} a step and {mfu} MFU expected ({'; '.join([name, *rests])})"
    if run.memory <= capacity:
        return [words]
    command = f"`mlm plan layouts gpus={ranks}` finds layouts that fit"
    return [words, f"warning: {gib(run.memory - capacity)} may be lacking; {command}"]
