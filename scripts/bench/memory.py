"""Peak memory of training steps above weights and optimizer state, in a fresh process."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch

from bench.contenders import Trainee
from bench.machine import status_bytes

MEASURED_STEPS = 2


def measure_peak(trainee: Trainee) -> dict[str, Any]:
    """Bytes a step needs at most above the state in which weights and optimizer state exist.

    After a warm-up, so that libraries' own memory and compiled code are in the baseline; gradients are
    above it. On CPU: the resident set, its high-water mark reset by /proc/self/clear_refs.
    """
    trainee.clear()
    gc.collect()
    cuda = trainee.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        baseline = torch.cuda.memory_allocated()
    else:
        return_freed_memory()
        method = reset_high_water_mark()
        baseline = status_bytes("VmRSS")
    for index in range(MEASURED_STEPS):
        trainee.step(index)
    if cuda:
        torch.cuda.synchronize()
        peak, method = torch.cuda.max_memory_allocated(), "torch.cuda.max_memory_allocated"
    else:
        peak = status_bytes("VmHWM")
    return {"baseline_bytes": baseline, "peak_above_bytes": peak - baseline, "method": method}


def return_freed_memory() -> None:
    """Give freed heap back to the system, or the baseline would hold what building the model left."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        return


def reset_high_water_mark() -> str:
    """Set VmHWM to the resident set of now; how the peak is measured, in words."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return (
            "VmHWM since the start of the process (it could not be reset: too high if building needed more)"
        )
    return "VmHWM, reset after warm-up"
