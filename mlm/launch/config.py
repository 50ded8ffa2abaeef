"""Settings of devices, process groups and launching."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from mlm.config.fields import Forbid


@dataclass(frozen=True, kw_only=True, slots=True)
class DistConfig:
    """Devices, process groups and launching."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA when a GPU is present."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on CUDA, gloo on CPU."""
    timeout_s: float = 600.0
    """Seconds after which a collective that has not finished counts as hung."""
    checkpoint_timeout_s: float = 1800.0
    """Seconds after which a checkpoint that not all ranks have written counts as failed."""
    threads_per_rank: int | None = None
    """CPU threads of each rank; null shares the cores of this host among its ranks."""
    master_port: int = 0
    """TCP port the ranks of a plain launch meet on; 0 picks a free one."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of one device that MFU is stated against; null takes the table for known GPUs."""
