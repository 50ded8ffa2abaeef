"""The GPUs of this host. Torch is imported only if there may be one."""

import ctypes
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mlm.launch.config import NO_GPU, NO_GPU_FIX, DistConfig
from mlm.optim.auto_precision import Gpu
from mlm.util.errors import UserError

DRIVER = "libcuda.so.1"
"""Library of NVIDIA's driver, which torch's CUDA needs."""


def device_kind(dist: DistConfig) -> Literal["cpu", "cuda"]:
    """Return dist.device with auto resolved. Raises UserError if CUDA is requested and absent."""
    if dist.device == "cpu":
        return "cpu"
    if _may_have_gpus() and _cuda().is_available():
        return "cuda"
    if dist.device == "cuda":
        raise UserError(f"dist.device=cuda, but {NO_GPU}", keys=("dist.device",), fix=NO_GPU_FIX)
    return "cpu"


def count_gpus() -> int:
    return int(_cuda().device_count()) if _may_have_gpus() else 0


def first_gpu(device: str) -> Gpu | None:
    """Return the GPU that dist.device selects; None for the CPU, or without a GPU."""
    if device == "cpu" or not count_gpus():
        return None
    return Gpu(_cuda().get_device_name(), _cuda().get_device_capability())


def _cuda() -> Any:
    import torch  # late: the import takes as long as the rest of a command

    return torch.cuda


def _may_have_gpus() -> bool:
    """False if torch was built without GPUs, or for CUDA and there is no driver. Imports no torch."""
    spec = find_spec("torch")
    if "torch" in sys.modules or spec is None or spec.origin is None:
        return True
    # torch/version.py has the build's `cuda = '12.8'` or `hip = '6.2'`, else None.
    source = Path(spec.origin).with_name("version.py").read_text()
    libraries = re.findall(r"^(cuda|hip)\b[^=]*= *['\"]", source, re.MULTILINE)
    if "cuda" not in libraries:
        return "hip" in libraries
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True
