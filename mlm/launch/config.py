"""Settings of devices, process groups and launching, and of `mlm doctor`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mlm.config.fields import PORT, POSITIVE, SECONDS, ResultFile
from mlm.parallel.config import ParallelConfig

NO_GPU = "torch sees no GPU on this host"
NO_GPU_FIX = "start it on GPU nodes, check it here with --check, or set dist.device=auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class DistConfig:
    """Devices, process groups and launching."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA when a GPU is present."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on CUDA, gloo on CPU."""
    timeout_s: Annotated[float, SECONDS] = 600.0
    """Seconds after which a collective that has not finished counts as hung."""
    checkpoint_timeout_s: Annotated[float, SECONDS] = 1800.0
    """Seconds after which a checkpoint that not all ranks have written counts as failed."""
    threads_per_rank: Annotated[int | None, POSITIVE] = None
    """CPU threads of each rank; null takes OMP_NUM_THREADS of a plain launch, else shares the cores of this
    host among its ranks."""
    master_port: Annotated[int, PORT] = 0
    """TCP port for the rendezvous of a plain launch; 0 picks a free one."""
    peak_tflops: Annotated[float | None, POSITIVE] = None
    """Peak TFLOP/s of one device that MFU is stated against; null takes the table for known GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """The run spec of `mlm doctor`: the hosts, disks and network of a run, before it."""

    out: ResultFile | None = None
    """JSON file for the result. Its disk is checked; null checks the disk of the
    working folder."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dist: DistConfig = field(default_factory=DistConfig)
