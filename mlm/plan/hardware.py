"""What a plan knows of hardware: the fields of configs/hardware/*.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import yaml  # type: ignore[import-untyped]

from mlm.config.fields import NOT_NEGATIVE, POSITIVE, PROBABILITY, Forbid
from mlm.config.paths import CONFIG_DIR


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakConfig:
    """Dense peak of one device by dtype, in TFLOP/s; null where it has no such units."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    bf16: Annotated[float | None, POSITIVE] = None
    """bfloat16 products with float32 sums."""
    fp16: Annotated[float | None, POSITIVE] = None
    """float16 products with float32 sums."""
    fp32: Annotated[float | None, POSITIVE] = None
    """float32 products as PyTorch computes them by default, without TF32."""
    fp64: Annotated[float | None, POSITIVE] = None
    """float64 products."""
    fp8: Annotated[float | None, POSITIVE] = None
    """8-bit products; for comparison with published runs, this toolkit has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EfficiencyConfig:
    """Constants of software on this hardware: the few numbers that are fitted or measured."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    matmul: Annotated[float, PROBABILITY] = 0.8
    """Share of the peak that a very large matrix product reaches."""
    matmul_half: Annotated[float, NOT_NEGATIVE] = 100.0
    """Size of one dimension of a product at which half of that is left: each counts x / (x + matmul_half)."""
    attention: Annotated[float, PROBABILITY] = 0.4
    """Share of the peak that fused attention reaches on full tiles."""
    memory: Annotated[float, PROBABILITY] = 0.8
    """Share of the memory bandwidth that elementwise kernels reach."""
    network: Annotated[float, PROBABILITY] = 0.7
    """Share of the links' bandwidth that large collectives reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareConfig:
    """Devices of one type, in nodes."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    name: str
    """Name in reports."""
    device: Literal["gpu", "cpu"]
    """gpu: attention is fused and communication overlaps computation. cpu: neither."""
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
    power_w: Annotated[float, POSITIVE]
    """Power of a node under load for each device, W, without cooling."""
    peak_tflops: PeakConfig = field(default_factory=PeakConfig)
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s. Raises ValueError for a dtype that the device has no units for."""
        found: float | None = getattr(self.peak_tflops, dtype)
        if found is None:
            raise ValueError(f"{self.name} has no peak_tflops.{dtype}")
        return found * 1e12


def hardware_of(values: Mapping[str, Any]) -> HardwareConfig:
    """Hardware of the values of a YAML; they are not checked."""
    peak = PeakConfig(**values.get("peak_tflops", {}))
    efficiency = EfficiencyConfig(**values.get("efficiency", {}))
    return HardwareConfig(**{**values, "peak_tflops": peak, "efficiency": efficiency})


def preset(name: str) -> HardwareConfig:
    """A shipped choice of `hardware=`."""
    return hardware_of(yaml.safe_load((CONFIG_DIR / "hardware" / f"{name}.yaml").read_text("utf-8")))
