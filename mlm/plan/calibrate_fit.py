"""Constants of hardware from measured times.

Each is what its equation in cost.py gives the measured times with the least relative error.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

from mlm.parallel.config import ParallelConfig
from mlm.plan.cost import CostModel
from mlm.plan.dry_run_meter import BACKWARD, FORWARD
from mlm.plan.hardware import EfficiencyConfig, HardwareConfig, PeakConfig
from mlm.plan.layer_counts import LayerCounts
from mlm.plan.layout import PlannedLayout

HALVES = (0, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
"""Values of `matmul_half` that are tried."""
LEAST_REMAINDER = 0.02
"""Least share of a layer's time that kernels which are no products are given."""
LEAST = {"gpu": {"memory_gbps": 50.0}, "cpu": {"memory_gbps": 1.0}}
"""Least numbers of real hardware by device; below them the measurement went wrong."""
LEAST_SHARE = 0.03
"""Least share of the peak that products and attention reach."""
LEAST_LINK_GBPS = 1e-3


class Timing(NamedTuple):
    """A measurement, all ranks of the host busy with the same."""

    kind: str
    """product: a linear layer, forward and both gradients. fused: attention, forward and backward. copy.
    layer: forward and backward. within, across: a collective or a transfer on a host, between hosts."""
    name: str
    """Format of a product; all_reduce, all_gather, reduce_scatter or send."""
    sizes: tuple[int, ...]
    """Of a product [m, k] x [k, n]; of attention sequences times heads, tokens, width of a head; bytes of a
    copy; the micro-batch of a layer; ranks, and bytes of the whole message."""
    seconds: float

    @property
    def rate(self) -> float:
        """FLOP/s of a product; bytes/s of a copy, read and written."""
        return (2 if self.kind == "copy" else 6) * math.prod(self.sizes) / self.seconds

    @property
    def passes(self) -> tuple[float, float]:
        """Latencies and bytes of a rank that the equation of a message counts."""
        ranks, size = self.sizes
        if self.name == "send":
            return 1.0, float(size)
        times = 2 if self.name == "all_reduce" else 1  # a reduce-scatter and an all-gather
        return float(times * math.ceil(math.log2(ranks))), times * (ranks - 1) / ranks * size


def of_kind(timings: Sequence[Timing], kind: str) -> list[Timing]:
    """Return the measurements of a kind."""
    return [timing for timing in timings if timing.kind == kind]


def fit(timings: Sequence[Timing], counts: LayerCounts, blank: HardwareConfig, dtype: str) -> HardwareConfig:
    """`blank` with all that was measured; `counts` are those of the layer that was timed.

    A peak that `blank` has already, from a datasheet, stays.
    """
    known = getattr(blank.peak_tflops, dtype)
    products = of_kind(timings, "product")
    own = [product for product in products if product.name == dtype]
    peak, matmul, half = fit_products(own, None if known is None else known * 1e12)
    peaks = {product.name: product.rate / 1e12 for product in products} | {dtype: peak / 1e12}
    given = {n: v for n in PeakConfig.__slots__ if (v := getattr(blank.peak_tflops, n)) is not None}
    (copy,) = of_kind(timings, "copy")
    efficiency = EfficiencyConfig(
        matmul=figures(matmul),
        matmul_half=half,
        attention=figures(fused_share(of_kind(timings, "fused"), peak)),
        memory=1.0,
        network=1.0,
    )
    fitted = replace(
        blank,
        memory_gbps=figures(copy.rate / 1e9),
        peak_tflops=PeakConfig(**{n: figures(v) for n, v in {**peaks, **given}.items()}),
        efficiency=efficiency,
    )
    within = of_kind(timings, "within")
    if within:
        latency, rate = fit_link(within)
        fitted = replace(fitted, node_gbps=figures(rate / 1e9), node_latency_us=figures(latency * 1e6))
    if across := of_kind(timings, "across") or within:
        latency, rate = fit_link(across)
        fitted = replace(fitted, network_gbps=figures(rate / 1e9), network_latency_us=figures(latency * 1e6))
    fitted = replace(fitted, network_is_assumed=not of_kind(timings, "across"))
    return fit_kernels(timings, counts, fitted)


def implausible(hardware: HardwareConfig) -> list[str]:
    """Fitted numbers that no working machine has, as `key=value`."""
    efficiency = hardware.efficiency
    least = {"node_gbps": LEAST_LINK_GBPS, "network_gbps": LEAST_LINK_GBPS, **LEAST[hardware.device]}
    low = [f"{key}={value:g}" for key, floor in least.items() if (value := getattr(hardware, key)) < floor]
    shares = {"matmul": efficiency.matmul, "attention": efficiency.attention}
    return low + [f"efficiency.{key}={value:g}" for key, value in shares.items() if value < LEAST_SHARE]


def fit_products(products: Sequence[Timing], known: float | None) -> tuple[float, float, float]:
    """Peak in FLOP/s (`known`, or the highest rate), share of it that large products reach, and its half."""
    best = (math.inf, 0.0, 0.0)
    for tried in HALVES:
        logs = [math.log(p.rate * math.prod((x + tried) / x for x in p.sizes)) for p in products]
        spread = fmean((log - fmean(logs)) ** 2 for log in logs)
        best = min(best, (spread, math.exp(fmean(logs)), float(tried)))
    _, limit, half = best
    peak = known or max(limit, *(p.rate for p in products))
    return peak, min(limit / peak, 1.0), half


def fused_share(measured: Sequence[Timing], peak: float) -> float:
    """Share of the peak that causal attention reaches: seven products, of which half is masked."""
    rates = [
        3.5 * 2 * batch * seq**2 * width / each.seconds
        for each in measured
        for batch, seq, width in [each.sizes]
    ]
    return min(median(rates) / peak, 1.0)


def fit_link(messages: Sequence[Timing]) -> tuple[float, float]:
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


def fit_kernels(timings: Sequence[Timing], counts: LayerCounts, hardware: HardwareConfig) -> HardwareConfig:
    """With the share of the memory bandwidth that kernels reach, and the least time of one.

    They are what a layer takes beyond its products and attention, on a micro-batch of each of two sizes.
    """
    measured = {timing.sizes[0]: timing.seconds for timing in of_kind(timings, "layer")}
    model, rows = CostModel(counts, replace(hardware, kernel_us=0.0), 1), []
    fused, of_one = model.software.compiled, counts.counts(ParallelConfig()).passes
    for size, seconds in measured.items():
        time = model.homes(PlannedLayout(micro_batch=size))["0"]
        works = [[each.work[phase, "0"] for phase in (FORWARD, BACKWARD)] for each in of_one]
        moved = [sum(w.fused_bytes if fused else w.eager_bytes for w in each) for each in works]
        size_moved = moved[0] + (size - 1) * (moved[1] - moved[0])
        explained = sum(time.forward[:2]) + sum(time.backward[:2])
        kernels = 0 if fused else sum(w.kernels for w in works[0])
        rows.append((max(seconds - explained, LEAST_REMAINDER * seconds), size_moved, kernels))
    (small, small_bytes, kernels), (large, large_bytes, _) = sorted(rows)
    rate = (large_bytes - small_bytes) / max(large - small, 1e-9)
    rate = min(max(rate, small_bytes / small), hardware.memory_gbps * 1e9)
    left = max(small - small_bytes / rate, 0.0) / kernels if kernels else 0.0
    share = rate / (hardware.memory_gbps * 1e9)
    efficiency = replace(hardware.efficiency, memory=figures(share))
    return replace(hardware, efficiency=efficiency, kernel_us=figures(left * 1e6))


def figures(value: float, digits: int = 3) -> float:
    """A number rounded to some significant figures."""
    return float(f"{value:.{digits}g}")
