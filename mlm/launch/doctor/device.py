"""Checks of a rank's device: free memory, driver, clocks, and that all ranks have the same."""

import os
import subprocess
from collections.abc import Sequence

import torch

from mlm.launch.doctor.finding import Finding
from mlm.util.terminal import size

FIELDS = (
    *("driver_version", "clocks.max.sm", "clocks_throttle_reasons.active"),
    "ecc.errors.uncorrected.volatile.total",
)
QUERY_S = 20.0
SLOWED = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
"""Bits of nvidia-smi's reasons for lower clocks that name a defect; a power cap and idleness do not."""
IN_USE = 0.1
"""Share of a GPU's memory above which another program uses it."""


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the cores of a CPU rank."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads a rank"


def check_device(device: torch.device) -> list[Finding]:
    """Judge this rank's device, without the others'."""
    if device.type != "cuda":
        return []
    free, whole = torch.cuda.mem_get_info(device)
    said = f"{size(free)} of {size(whole)} free"
    used = free < (1 - IN_USE) * whole
    remedy = "end the programs that nvidia-smi lists on it, or choose GPUs by CUDA_VISIBLE_DEVICES"
    uuid = torch.cuda.get_device_properties(device).uuid
    return [Finding("GPU memory", "warn" if used else "ok", said, remedy), *judged(queried(str(uuid)))]


def queried(uuid: str) -> list[str] | None:
    """Return what nvidia-smi says of a GPU by FIELDS; None where it cannot be asked."""
    query = f"--query-gpu={','.join(FIELDS)}"
    command = ["nvidia-smi", f"--id=GPU-{uuid}", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.split(",")]
    return values if len(values) == len(FIELDS) else None


def judged(values: Sequence[str] | None) -> list[Finding]:
    """Judge driver, clocks and memory errors by what nvidia-smi says."""
    if values is None:
        return [Finding("driver", "warn", "nvidia-smi gives no answer", "install it beside the driver")]
    driver, most, reasons, errors = values
    found = [Finding("driver", "ok", driver)]
    bits = int(reasons, 16) if reasons.startswith("0x") else 0
    slowed = list(dict.fromkeys(why for bit, why in SLOWED.items() if bits & bit))
    remedy = "look at nvidia-smi -q -d PERFORMANCE, and at fans and power; leave out this host meanwhile"
    said = f"{most} MHz at most" + (f", slowed by {', '.join(slowed)}" if slowed else "")
    found.append(Finding("clocks", "warn" if slowed else "ok", said, remedy))
    if errors.isdecimal():
        said = f"{errors} uncorrected since the driver's start"
        remedy = "reset or replace the GPU; leave out this host meanwhile"
        found.append(Finding("GPU errors", "fail" if int(errors) else "ok", said, remedy))
    return found
