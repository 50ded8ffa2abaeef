"""Constants of hardware from measured times. No torch.

Each is what its equation in cost.py gives the measured times with the least relative error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TypeVar

from mlm.plan.cost import FLASH_BACKWARD, UNFUSED_BACKWARD, CostModel
from mlm.plan.hardware import EfficiencyConfig, HardwareConfig, PeakConfig
from mlm.plan.shape import PlannedLayout, Shape

HALVES = (0, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
"""Values of `matmul_half` that are tried."""
LEAST_REMAINDER = 0.02
"""Least share of a layer's time that its elementwise kernels, and work on its weights, are given."""
REDUCTIONS = 2
"""Passes of an all-reduce: a reduce-scatter and an all-gather."""


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer, forward and both gradients: three products [m, k] x [k, n]."""

    m: int
    k: int
    n: int
    seconds: float

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return 6 * self.m * self.k * self.n / self.seconds


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one micro-batch, forward and backward."""

    batch: int
    """Sequences times heads."""
    seq: int
    head_dim: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Message:
    """A collective or a transfer."""

    op: str
    """all_reduce, all_gather, reduce_scatter or send."""
    size: int
    """Bytes of the whole."""
    ranks: int
    seconds: float

    @property
    def passes(self) -> tuple[float, float]:
        """Latencies and bytes of a rank that its equation counts."""
        if self.op == "send":
            return 1.0, float(self.size)
        times = REDUCTIONS if self.op == "all_reduce" else 1
        share = (self.ranks - 1) / self.ranks
        return float(times * math.ceil(math.log2(self.ranks))), times * share * self.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that was measured on a rank, all ranks of the host busy at once."""

    products: list[Product]
    peaks: dict[str, float]
    """FLOP/s of the fastest large product of other formats."""
    copy: float
    """Bytes/s of a copy, read and written."""
    fused: list[Attention]
    unfused: list[Attention] = field(default_factory=list)
    """With dropout; of CPUs, which have no fused kernel for it."""
    layer_shape: Shape
    layer: dict[int, float]
    """Seconds of a transformer layer, forward and backward, on micro-batches of two sizes."""
    optimizer: float
    """Seconds of the optimizer's step for each parameter."""
    waiting: float = 0.0
    """Share of the time in which a thread was ready and another program had its processor."""
    within: list[Message] = field(default_factory=list)
    across: list[Message] = field(default_factory=list)


def fit(measured: Measured, blank: HardwareConfig, dtype: str) -> HardwareConfig:
    """`blank`, which names the devices and their memory, with all that was measured.

    A peak that `blank` has already, from a datasheet, stays.
    """
    known = getattr(blank.peak_tflops, dtype)
    peak, matmul, half = fit_products(measured.products, None if known is None else known * 1e12)
    peaks = {name: rate / 1e12 for name, rate in measured.peaks.items()}
    given = {n: v for n in PeakConfig.__slots__ if (v := getattr(blank.peak_tflops, n)) is not None}
    efficiency = EfficiencyConfig(
        matmul=figures(matmul),
        matmul_half=half,
        attention=figures(fused_share(measured.fused, peak, half)),
        unfused_attention=figures(unfused_share(measured.unfused, peak)) if measured.unfused else None,
        memory=1.0,
        network=1.0,
    )
    found = replace(
        blank,
        memory_gbps=figures(measured.copy / 1e9),
        peak_tflops=PeakConfig(**{n: figures(v) for n, v in {**peaks, dtype: peak / 1e12, **given}.items()}),
        efficiency=efficiency,
    )
    if measured.within:
        latency, rate = fit_link(measured.within)
        found = replace(found, node_gbps=figures(rate / 1e9), node_latency_us=figures(latency * 1e6))
    if across := measured.across or measured.within:
        latency, rate = fit_link(across)
        found = replace(found, network_gbps=figures(rate / 1e9), network_latency_us=figures(latency * 1e6))
    return replace(found, efficiency=fit_rest(measured, found, dtype))


LEAST = {"gpu": {"memory_gbps": 50.0}, "cpu": {"memory_gbps": 1.0}}
"""Least numbers of real hardware by device; below them the measurement went wrong."""
LEAST_SHARE = 0.03
"""Least share of the peak that products and attention reach."""
LEAST_LINK_GBPS = 1e-3


def implausible(hardware: HardwareConfig) -> list[str]:
    """Fitted numbers that no working machine has, as `key=value`."""
    efficiency = hardware.efficiency
    least = {"node_gbps": LEAST_LINK_GBPS, "network_gbps": LEAST_LINK_GBPS, **LEAST[hardware.device]}
    low = [f"{key}={value:g}" for key, floor in least.items() if (value := getattr(hardware, key)) < floor]
    shares = {"matmul": efficiency.matmul, "attention": efficiency.attention}
    return low + [f"efficiency.{key}={value:g}" for key, value in shares.items() if value < LEAST_SHARE]


def fit_products(products: Sequence[Product], known: float | None) -> tuple[float, float, float]:
    """Peak in FLOP/s (`known`, or the highest rate), share of it that large products reach, and its half."""
    best = (math.inf, 0.0, 0.0)
    for tried in HALVES:
        logs = [math.log(p.rate * math.prod((x + tried) / x for x in (p.m, p.k, p.n))) for p in products]
        spread = fmean((log - fmean(logs)) ** 2 for log in logs)
        best = min(best, (spread, math.exp(fmean(logs)), float(tried)))
    _, limit, half = best
    peak = known or max(limit, *(p.rate for p in products))
    return peak, min(limit / peak, 1.0), half


def fused_share(measured: Sequence[Attention], peak: float, half: float) -> float:
    """Share of the peak that causal attention reaches on full tiles."""
    rates = [
        (1 + FLASH_BACKWARD) * 2 * a.batch * a.seq**2 * a.head_dim / (a.seconds * a.seq / (a.seq + half))
        for a in measured
    ]
    return min(median(rates) / peak, 1.0)


def unfused_share(measured: Sequence[Attention], peak: float) -> float:
    """Share of the peak that attention with dropout reaches, all scores counted."""
    rates = [(1 + UNFUSED_BACKWARD) * 4 * a.batch * a.seq**2 * a.head_dim / a.seconds for a in measured]
    return median(rates) / peak


def fit_link(messages: Sequence[Message]) -> tuple[float, float]:
    """Latency in seconds and bytes/s of the least squared relative error."""
    rows = [(a / m.seconds, b / m.seconds) for m in messages for a, b in [m.passes]]
    aa, ab, bb = (sum(x) for x in zip(*((a * a, a * b, b * b) for a, b in rows), strict=True))
    one, two = (math.fsum(x) for x in zip(*rows, strict=True))
    latency: float = 0.0
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        latency = max((one * bb - two * ab) / determinant, 0.0)
    per_byte = (two - latency * ab) / bb
    if per_byte <= 0:  # no message was large enough to show it
        per_byte = min(m.seconds / m.passes[1] for m in messages)
        latency = 0.0
    return latency, 1 / per_byte


def fit_rest(measured: Measured, hardware: HardwareConfig, dtype: str) -> EfficiencyConfig:
    """The constants of elementwise kernels, from what a layer takes beyond the rest, and of the optimizer."""
    (small, small_s), (large, large_s) = sorted(measured.layer.items())
    model = CostModel(measured.layer_shape, hardware, dtype)
    layers = {
        size: model.layer(PlannedLayout(micro_batch=size, global_batch=size)) for size in (small, large)
    }
    first = layers[small]
    # what products and attention do not explain: a share for each sample, and one for each micro-batch
    rest = {size: measured.layer[size] - layer.products for size, layer in layers.items()}
    sample = max((rest[large] - rest[small]) / (large - small), LEAST_REMAINDER * large_s / large)
    once = max(rest[small] - small * sample, LEAST_REMAINDER * small_s)
    elementwise = (first.elementwise + first.elementwise_backward) / small
    return replace(
        hardware.efficiency,
        elementwise=figures(elementwise / sample),
        weights=figures(first.weights / once),
        optimizer=figures(model.optimizer(1) / measured.optimizer),
    )


def figures(value: float, digits: int = 3) -> float:
    """A number rounded to some significant figures."""
    return float(f"{value:.{digits}g}")


def merged(each: Sequence[Measured]) -> Measured:
    """The ranks' measurements as one: of each time the median."""
    first = each[0]
    return replace(
        first,
        products=_medians([one.products for one in each]),
        fused=_medians([one.fused for one in each]),
        unfused=_medians([one.unfused for one in each]),
        within=_medians([one.within for one in each]),
        across=_medians([one.across for one in each]),
        peaks={name: median(one.peaks[name] for one in each) for name in first.peaks},
        copy=median(one.copy for one in each),
        layer={size: median(one.layer[size] for one in each) for size in first.layer},
        optimizer=median(one.optimizer for one in each),
        waiting=max(one.waiting for one in each),
    )


T = TypeVar("T", Product, Attention, Message)


def _medians(lists: Sequence[list[T]]) -> list[T]:
    """One list of several of the same measurements."""
    columns = zip(*lists, strict=True)
    return [replace(column[0], seconds=median(item.seconds for item in column)) for column in columns]
