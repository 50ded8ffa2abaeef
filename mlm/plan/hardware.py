"""Hardware of a plan: the fields of configs/hardware/*.yaml, presets, and this host's calibration."""

import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml  # type: ignore[import-untyped]

from mlm.config.fields import NOT_NEGATIVE, POSITIVE, PROBABILITY
from mlm.config.paths import CONFIG_DIR
from mlm.util.errors import Problem, UserError

GIB = 2**30
GPU_RESERVED_GIB, CPU_RESERVED_GIB = 1.5, 0.3
"""GiB that a rank takes before the model: driver and libraries on a GPU, the program on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakConfig:
    """Dense peak of one device by dtype, in TFLOP/s; null where it has no such units."""

    bf16: Annotated[float | None, POSITIVE] = None
    """bfloat16 products with float32 sums."""
    fp16: Annotated[float | None, POSITIVE] = None
    """float16 products with float32 sums."""
    fp32: Annotated[float | None, POSITIVE] = None
    """float32 products as PyTorch computes them by default, without TF32."""
    tf32: Annotated[float | None, POSITIVE] = None
    """float32 products with 10 bits of mantissa."""
    fp64: Annotated[float | None, POSITIVE] = None
    """float64 products."""
    fp8: Annotated[float | None, POSITIVE] = None
    """8-bit products with float32 sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EfficiencyConfig:
    """Constants of software on this hardware: the few numbers that are fitted or measured."""

    matmul: Annotated[float, PROBABILITY] = 0.8
    """Share of the peak that a very large matrix product reaches."""
    matmul_half: Annotated[float, NOT_NEGATIVE] = 100.0
    """Size of a dimension of a product that halves its rate: each dimension counts x / (x + matmul_half)."""
    attention: Annotated[float, PROBABILITY] = 0.4
    """Share of the peak that fused attention reaches, forward and backward."""
    memory: Annotated[float, PROBABILITY] = 0.8
    """Share of the memory bandwidth that kernels other than products reach."""
    network: Annotated[float, PROBABILITY] = 0.7
    """Share of the links' bandwidth that large collectives reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareConfig:
    """Devices of one type, in nodes."""

    name: str
    """Name in reports."""
    device: Literal["gpu", "cpu"]
    """gpu: attention is fused and communication overlaps computation. cpu: neither; a device is one of
    devices_per_node ranks that share a host."""
    gpu_name: str | None = None
    """Regular expression of torch's name of this GPU; a run on such a GPU takes this preset."""
    devices_per_node: Annotated[int, POSITIVE]
    """Devices that the fast links connect."""
    memory_gib: Annotated[float, POSITIVE]
    """Memory of one device, GiB."""
    reserved_gib: Annotated[float, NOT_NEGATIVE]
    """Memory of one device that no tensor can use, GiB: driver context, libraries, buffers of NCCL."""
    memory_gbps: Annotated[float, POSITIVE]
    """Memory bandwidth of one device, GB/s."""
    node_gbps: Annotated[float, POSITIVE]
    """Bandwidth of one device's links within a node, one direction, GB/s."""
    node_latency_us: Annotated[float, NOT_NEGATIVE]
    """Time of the smallest message within a node, microseconds."""
    network_gbps: Annotated[float, POSITIVE]
    """Bandwidth between nodes for each device, one direction, GB/s: the node's network over its devices."""
    network_latency_us: Annotated[float, NOT_NEGATIVE]
    """Time of the smallest message between nodes, microseconds."""
    network_post_us: Annotated[float, NOT_NEGATIVE] = 1.0
    """Time in which the host posts a message to the network, microseconds: in NCCL 2 on AMD CPUs, else 1."""
    multiprocessors: Annotated[int | None, POSITIVE] = None
    """Multiprocessors of a device; messages take some from concurrent kernels, none if null."""
    kernel_us: Annotated[float, NOT_NEGATIVE] = 0.0
    """Time of the smallest kernel and its launch, microseconds; 0 on a GPU, where the host runs ahead."""
    is_calibrated: bool = False
    """True if `efficiency.matmul` was measured with mlm, by `mlm plan calibrate`."""
    network_is_assumed: bool = False
    """True if `network_*` repeat the links within a node, as after a calibration of one node."""
    peak_tflops: PeakConfig = field(default_factory=PeakConfig)
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)

    def peak(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s. Raises UserError for a dtype without one."""
        peaks = {name: peak for name, peak in asdict(self.peak_tflops).items() if peak is not None}
        if dtype in peaks:
            return float(peaks[dtype] * 1e12)
        problem = f"precision={dtype}: {self.name} has no peak_tflops.{dtype}"
        other = f"use precision={next(iter(peaks))}, or " if peaks else ""
        raise UserError(f"{problem}; {other}add hardware.peak_tflops.{dtype}=…")

    def for_ranks(self, ranks: int) -> "HardwareConfig":
        """Return one of `ranks` devices: fewer ranks on a CPU host have more cores and memory each."""
        if self.device == "gpu" or ranks >= self.devices_per_node:
            return self
        share = self.devices_per_node / ranks
        peaks = {name: peak and peak * share for name, peak in asdict(self.peak_tflops).items()}
        return replace(
            self,
            devices_per_node=ranks,
            memory_gib=self.memory_gib * share,
            memory_gbps=self.memory_gbps * share,
            peak_tflops=PeakConfig(**peaks),
        )


def hardware_of(values: Mapping[str, Any]) -> HardwareConfig:
    """Build hardware from the values of a YAML file, unchecked."""
    peak = PeakConfig(**values.get("peak_tflops", {}))
    efficiency = EfficiencyConfig(**values.get("efficiency", {}))
    return HardwareConfig(**{**values, "peak_tflops": peak, "efficiency": efficiency})


def build_hardware(**values: Any) -> HardwareConfig:
    """Build this machine's hardware from the measured values; each other rate is 1."""
    rates = ("memory_gbps", "node_gbps", "node_latency_us", "network_gbps", "network_latency_us")
    return HardwareConfig(**{**dict.fromkeys(rates, 1.0), "is_calibrated": True, **values})


def preset(name: str) -> HardwareConfig:
    """Return a shipped choice of `hardware=`."""
    return hardware_of(yaml.safe_load((CONFIG_DIR / "hardware" / f"{name}.yaml").read_text("utf-8")))


def preset_of_gpu(gpu_name: str) -> HardwareConfig | None:
    """Return the shipped preset of the GPU with torch's name `gpu_name`; None without one."""
    for path in sorted((CONFIG_DIR / "hardware").glob("*.yaml")):
        hardware = preset(path.stem)
        if hardware.gpu_name is not None and re.search(hardware.gpu_name, gpu_name):
            return hardware
    return None


def calibration_file() -> Path:
    """Path of this host's calibration: `mlm plan calibrate` writes it, `hardware=this` reads it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mlm" / "hardware" / f"{socket.gethostname()}.yaml"


def find_calibration() -> Path | Problem:
    """Return the file of `hardware=this`, or the problem of a host that was not calibrated."""
    path = calibration_file()
    if path.is_file():
        return path
    return Problem(
        ("hardware",),
        "hardware=this: this machine was not calibrated",
        "run `mlm plan calibrate` first, or choose a preset (`mlm plan layouts --help hardware`)",
    )


def read_calibration() -> HardwareConfig | None:
    """Return this host's calibration; None without one, or if the file cannot be read."""
    try:
        return hardware_of(yaml.safe_load(calibration_file().read_text("utf-8")))
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, yaml.YAMLError):
        return None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text("utf-8", errors="replace") if info.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)", text, re.MULTILINE)
    return match[1].strip() if match else "CPU"


def gib(size: float) -> str:
    """Format bytes as `3.1 GiB`."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{math.ceil(size / 2**20)} MiB"
