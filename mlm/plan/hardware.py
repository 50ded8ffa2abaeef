"""Hardware of a plan: the fields of configs/hardware/*.yaml, presets, and this machine as calibrated."""

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
"""GiB that a rank has before the model: driver and libraries on a GPU, the program on a CPU."""


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
    """float32 products of which 10 bits of the mantissa are read."""
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
    """Size of one dimension of a product at which half of that is left: each counts x / (x + matmul_half)."""
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
    """Regular expression of the name by which torch knows this GPU; a run on one takes this preset."""
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
    """Time in which the host posts a message to the network, microseconds: of NCCL, 2 on AMD's, else 1."""
    multiprocessors: Annotated[int | None, POSITIVE] = None
    """Units of a device of which messages take some from concurrent kernels; null where none are
    taken."""
    kernel_us: Annotated[float, NOT_NEGATIVE] = 0.0
    """Time of the smallest kernel, with what starts it, microseconds; 0 where it is not counted: the
    host runs ahead of a GPU."""
    is_calibrated: bool = False
    """True if `efficiency.matmul` was measured with this program, by `mlm plan calibrate`; the rest is of
    others."""
    network_is_assumed: bool = False
    """True if `network_*` are those within a node, as of a calibration of one node."""
    peak_tflops: PeakConfig = field(default_factory=PeakConfig)
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s. Raises UserError for a dtype that the device has no units for."""
        peaks = {name: peak for name, peak in asdict(self.peak_tflops).items() if peak is not None}
        if dtype in peaks:
            return float(peaks[dtype] * 1e12)
        problem = f"precision={dtype}: {self.name} has no peak_tflops.{dtype}"
        other = f"use precision={next(iter(peaks))}, or " if peaks else ""
        raise UserError(f"{problem}; {other}add hardware.peak_tflops.{dtype}=…")

    def for_ranks(self, ranks: int) -> "HardwareConfig":
        """Hardware of one of so many ranks: on a CPU host, fewer of them have more cores and memory each."""
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
    """Hardware of the values of a YAML; they are not checked."""
    peak = PeakConfig(**values.get("peak_tflops", {}))
    efficiency = EfficiencyConfig(**values.get("efficiency", {}))
    return HardwareConfig(**{**values, "peak_tflops": peak, "efficiency": efficiency})


def unmeasured(**known: Any) -> HardwareConfig:
    """Hardware of this machine of which nothing but the memory is known; each rate is 1."""
    rates = ("memory_gbps", "node_gbps", "node_latency_us", "network_gbps", "network_latency_us")
    return HardwareConfig(**{**dict.fromkeys(rates, 1.0), "is_calibrated": True, **known})


def preset(name: str) -> HardwareConfig:
    """A shipped choice of `hardware=`."""
    return hardware_of(yaml.safe_load((CONFIG_DIR / "hardware" / f"{name}.yaml").read_text("utf-8")))


def preset_of_gpu(gpu_name: str) -> HardwareConfig | None:
    """The shipped preset of the GPU that torch calls `gpu_name`; None for others."""
    for path in sorted((CONFIG_DIR / "hardware").glob("*.yaml")):
        hardware = preset(path.stem)
        if hardware.gpu_name is not None and re.search(hardware.gpu_name, gpu_name):
            return hardware
    return None


def calibration_file() -> Path:
    """File in which `mlm plan calibrate` keeps what it measured on this host; `hardware=this` reads it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mlm" / "hardware" / f"{socket.gethostname()}.yaml"


def this_machine() -> Path | Problem:
    """The file of `hardware=this`, or the problem that this host was not calibrated."""
    path = calibration_file()
    if path.is_file():
        return path
    return Problem(
        ("hardware",),
        "hardware=this: this machine was not calibrated",
        "run `mlm plan calibrate` first, or choose a preset (`mlm plan layouts --help hardware`)",
    )


def calibrated() -> HardwareConfig | None:
    """This machine as it was calibrated; None if it was not, or the file cannot be read."""
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
    """Bytes as `3.1 GiB`."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{math.ceil(size / 2**20)} MiB"
