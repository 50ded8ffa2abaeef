"""The measurements of `mlm plan calibrate`, on one rank while all others do the same."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.data.sampler import MicroBatch
from mlm.models.attention import fused_attention
from mlm.models.config import ModelConfig
from mlm.optim.auto_precision import AMPERE
from mlm.optim.config import PrecisionConfig
from mlm.optim.precision import DTYPES
from mlm.parallel.collectives import (
    all_gather,
    all_reduce,
    barrier,
    reduce_scatter,
    start_receive,
    start_send,
)
from mlm.parallel.linear import linear
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.plan.dry_run_rank import batches_of
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.training.trainer import Trainer

FORMATS = {"cpu": ("fp32", "bf16", "fp64"), "cuda": ("bf16", "fp16", "fp32", "fp64")}
"""Formats of products by device, first the one that all else is measured in."""
REPEATS = 4
"""Times that each measurement is taken at least; the least counts."""
LAYER_S = 0.8
"""Seconds that a layer is measured at least."""


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


@dataclass(frozen=True, slots=True)
class Workload:
    """Architecture of what is measured."""

    products: tuple[tuple[int, int, int], ...]
    """[m, k] x [k, n]."""
    copy: int
    """Bytes."""
    attention: tuple[tuple[int, int, int], ...]
    """Sequences times heads, tokens, width of a head."""
    messages: tuple[int, ...]
    """Bytes."""
    hidden: int
    seq: int
    micro_batches: tuple[int, int]
    """Two sizes, for what a layer costs once a micro-batch."""
    least_s: float
    """Seconds that a measurement lasts at least."""


WORKLOADS = {
    "cpu": Workload(
        products=(
            *((256, 128, 512), (256, 256, 1024), (256, 512, 512), (512, 256, 256), (512, 512, 1536)),
            *((512, 512, 2048), (512, 2048, 512), (1024, 128, 128), (1024, 384, 1536), (1024, 768, 768)),
            *((1024, 192, 768), (512, 384, 8192)),
        ),
        copy=64 << 20,
        attention=((12, 256, 64), (24, 128, 64), (8, 512, 64)),
        messages=(1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
        hidden=384,
        seq=128,
        micro_batches=(1, 8),
        least_s=0.03,
    ),
    "cuda": Workload(
        products=tuple(
            (rows, k, n)
            for rows in (2048, 8192)
            for k, n in ((1024, 1024), (2048, 2048), (2048, 8192), (4096, 4096), (8192, 2048), (4096, 16384))
        ),
        copy=1 << 30,
        attention=((64, 1024, 128), (64, 2048, 128), (32, 4096, 128), (64, 2048, 64)),
        messages=(1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
        hidden=4096,
        seq=2048,
        micro_batches=(1, 4),
        least_s=0.05,
    ),
}


def best_time(run: Callable[[], object], device: torch.device, least_s: float) -> float:
    """The least of some repetitions, in seconds.

    On a CPU of one thread its own clock, which stands still while others have the core.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    run()  # libraries and memory
    best, spent, repeats = math.inf, 0.0, 0
    while repeats < REPEATS or spent < least_s:
        synchronise(device)
        begin = clock()
        run()
        synchronise(device)
        took = clock() - begin
        best, spent, repeats = min(best, took), spent + took, repeats + 1
    return best


def processor_wait() -> float:
    """Seconds that threads of this process were ready to run and had no processor, since each began.

    Counted by Linux; 0 where it is not, as in some sandboxes.
    """
    total = 0
    for thread in os.listdir("/proc/self/task"):
        try:
            total += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has ended, or nothing is counted
            continue
    return total / 1e9


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Measurements:
    """All measurements of a rank, one after the other."""

    def __init__(self, ctx: ParallelContext, workload: Workload | None = None) -> None:
        self.ctx, self.device, formats = ctx, ctx.device, FORMATS[ctx.device.type]
        is_old = ctx.device.type == "cuda" and torch.cuda.get_device_capability(ctx.device) < AMPERE
        self.formats = formats[1:] if is_old else formats  # without units for bf16
        self.dtype = self.formats[0]
        self.workload = workload or WORKLOADS[ctx.device.type]

    @property
    def tasks(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The kind, name and sizes of each measurement, as in Timing."""
        load = self.workload
        largest = max(load.products, key=math.prod)
        axes = (("within", self.ctx.tp.size), ("across", self.ctx.dp.size))
        return [
            *(("product", self.dtype, sizes) for sizes in load.products),
            *(("product", other, largest) for other in self.formats[1:]),
            *(("fused", "", sizes) for sizes in load.attention),
            ("copy", "", (load.copy,)),
            *(("layer", "", (size,)) for size in load.micro_batches),
            *(
                (where, operation, (ranks, size))
                for where, ranks in axes
                for size in load.messages
                for operation in OPERATIONS
                if ranks > 1
            ),
        ]

    def run(self, advance: Callable[[int], None]) -> tuple[list[Timing], float]:
        """Measure; `advance` is called with 1 after each. Return also the share of time spent waiting.

        That is the time in which a thread was ready and another program had its processor.
        """
        begun, waited, timings = time.perf_counter(), processor_wait(), []
        for kind, name, sizes in self.tasks:
            timings.append(Timing(kind, name, sizes, self.measure(kind, name, sizes)))
            advance(1)
            barrier(self.ctx.world)  # all ranks are busy with the same
        available = (time.perf_counter() - begun) * torch.get_num_threads()
        return timings, max(processor_wait() - waited, 0.0) / available

    def measure(self, kind: str, name: str, sizes: tuple[int, ...]) -> float:
        """Seconds of one of `tasks`."""
        if kind in ("within", "across"):
            return self.message(name, sizes[1], self.ctx.tp if kind == "within" else self.ctx.dp)
        if kind == "layer":
            return self.layer(*sizes)
        if kind == "product":
            run = self.product(DTYPES[name], *sizes)
        elif kind == "copy":
            source = torch.zeros(sizes[0] // 4, device=self.device)
            run = partial(torch.empty_like(source).copy_, source)
        else:
            run = self.attention(*sizes)
        return best_time(run, self.device, self.workload.least_s)

    def random(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = False) -> Tensor:
        """A tensor of random numbers."""
        made = torch.randn(*shape, device=self.device).to(dtype or DTYPES[self.dtype])
        return made.requires_grad_(grad)

    def product(self, dtype: torch.dtype, m: int, k: int, n: int) -> Callable[[], object]:
        """A linear layer's forward and backward pass."""
        x, w = self.random(m, k, dtype=dtype, grad=True), self.random(n, k, dtype=dtype, grad=True)
        return both_passes(partial(linear, x, w), x, w)

    def attention(self, batch: int, seq: int, width: int) -> Callable[[], object]:
        """Causal attention over a fused projection, forward and backward."""
        heads = math.gcd(batch, 8)
        qkv = self.random(seq, batch // heads, 3 * heads * width, grad=True)
        return both_passes(partial(fused_attention, qkv, width, 0.0), qkv)

    def layer(self, size: int) -> float:
        """A layer on a micro-batch of `size`: what three layers take beyond one."""
        times, ctx = list[float](), ParallelContext(device=self.device)
        for layers in (1, 3):
            run = self.run_of(layers, size)
            trainer, batches = Trainer[MicroBatch](run, ctx), batches_of(run, [size])
            times.append(best_time(partial(trainer.compute_gradients, batches), self.device, LAYER_S))
        one, three = times
        return max(three - one, 0.1 * three) / 2

    def run_of(self, layers: int, size: int) -> PretrainConfig:
        """The run of one rank alone, a small GPT-2 without dropout on micro-batches of `size`."""
        load = self.workload
        return PretrainConfig(
            name="calibrate",
            out="",
            model=ModelConfig(
                num_layers=layers,
                hidden_size=load.hidden,
                num_heads=load.hidden // 64,
                max_positions=load.seq,
                vocab_size=1024,
                hidden_dropout=0.0,
                attention_dropout=0.0,
            ),
            train=TrainConfig(steps=1000, global_batch_size=size, micro_batch_size=size),
            data=DataConfig(kind="synthetic", seq_length=load.seq),
            precision=PrecisionConfig(dtype=cast(Any, self.dtype)),
        )

    def message(self, operation: str, size: int, axis: Axis) -> float:
        """Seconds of a communication: the least of some, in each the slowest rank's."""
        count = max(size // 4 // axis.size, 1) * axis.size
        x = torch.zeros(count, device=self.device)
        run = partial(OPERATIONS[operation], x, axis)
        best = math.inf
        for _ in range(2 + REPEATS * 2):
            barrier(self.ctx.world)
            synchronise(self.device)
            begin = time.perf_counter()
            run()
            synchronise(self.device)
            best = min(best, time.perf_counter() - begin)
        return best


def both_passes(forward: Callable[[], Tensor], *leaves: Tensor) -> Callable[[], object]:
    """A forward and a backward pass that makes the gradients of leaves anew."""
    dy = torch.randn_like(forward())

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(dy)

    return run


def transfer(x: Tensor, axis: Axis) -> None:
    """Each even rank of an axis sends to the next one."""
    peer = axis.rank ^ 1
    if peer < axis.size:
        begin = start_receive if axis.rank % 2 else start_send
        begin(x, axis, peer).wait()


OPERATIONS: dict[str, Callable[[Tensor, Axis], object]] = {
    "all_reduce": all_reduce,
    "all_gather": lambda x, axis: all_gather(x[: len(x) // axis.size], axis),
    "reduce_scatter": reduce_scatter,
    "send": transfer,
}
