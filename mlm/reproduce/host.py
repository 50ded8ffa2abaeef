"""The machine and the versions that steps run with, in words."""

import os

import torch

from mlm.launch.doctor.findings import versions
from mlm.plan.hardware import cpu_name


def hardware_here() -> str:
    """Return the processor with the cores that this process may use, and the GPUs."""
    cpu = f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"
    gpus = torch.cuda.device_count()
    return f"{gpus} {torch.cuda.get_device_name(0)}, {cpu}" if gpus else cpu


def versions_here() -> str:
    """Return `mlm 0.2.0, torch 2.13.0+cpu, python 3.11.7`."""
    return ", ".join(f"{name} {version}" for name, version in versions().items())
