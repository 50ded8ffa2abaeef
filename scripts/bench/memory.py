"""Peak memory of training steps above weights and optimizer state, in a fresh process."""

import ctypes
import gc
from contextlib import suppress
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
        with suppress(OSError, AttributeError):  # of another C library
            # else the baseline would hold what building the model left
            ctypes.CDLL(None).malloc_trim(0)
        method = "VmHWM, reset after warm-up"
        try:
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to the resident set of now
        except OSError:
            since = "VmHWM since the start of the process"
            method = f"{since} (it could not be reset: too high if building needed more)"
        baseline = status_bytes("VmRSS")
    for index in range(MEASURED_STEPS):
        trainee.step(index)
    if cuda:
        torch.cuda.synchronize()
        peak, method = torch.cuda.max_memory_allocated(), "torch.cuda.max_memory_allocated"
    else:
        peak = status_bytes("VmHWM")
    return {"baseline_bytes": baseline, "peak_above_bytes": peak - baseline, "method": method}
