"""The measurements of `mlm plan calibrate`, on one rank while all others do the same."""

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.attention import fused_attention, unfused_attention
from mlm.models.config import ModelConfig
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
from mlm.parallel.dropout import DropoutStream, site_keys
from mlm.parallel.linear import linear
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.plan.calibrate_config import Format
from mlm.plan.calibrate_fit import Attention, Measured, Message, Product
from mlm.plan.shape import Shape
from mlm.training.config import PretrainConfig, TrainConfig
from mlm.training.trainer import Trainer

T = TypeVar("T")
OTHER_FORMATS: dict[str, tuple[Format, ...]] = {
    "cpu": ("fp32", "bf16", "fp64"),
    "cuda": ("bf16", "fp16", "fp32", "fp64"),
}
REPEATS = 4
"""Times that each measurement is taken at least; the least counts."""
LAYER_S = 0.8
"""Seconds that a layer is measured at least."""
DROPOUT = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of what is measured."""

    products: tuple[tuple[int, int, int], ...]
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


SIZES = {
    "cpu": Sizes(
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
    "cuda": Sizes(
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

    def __init__(self, ctx: ParallelContext, dtype: Format, sizes: Sizes | None = None) -> None:
        self.ctx, self.device, self.dtype = ctx, ctx.device, dtype
        self.sizes = sizes or SIZES[ctx.device.type]

    @property
    def steps(self) -> int:
        """Measurements."""
        sizes, axes = self.sizes, sum(axis.size > 1 for axis in (self.ctx.tp, self.ctx.dp))
        unfused = len(sizes.attention) if self.device.type == "cpu" else 0
        formats = len(OTHER_FORMATS[self.device.type])
        kernels = len(sizes.products) + formats + len(sizes.attention) + unfused + 4
        return kernels + axes * len(OPERATIONS) * len(sizes.messages)

    def run(self, advance: Callable[[int], None]) -> Measured:
        """Measure; `advance` is called with 1 after each."""

        def each(items: Iterator[T]) -> list[T]:
            found = []
            for item in items:
                advance(1)
                barrier(self.ctx.world)  # all ranks are busy with the same
                found.append(item)
            return found

        begun, waited = time.perf_counter(), processor_wait()
        products, peaks = each(self.products()), each(self.peaks())
        fused = each(self.attention(self.fused))
        unfused = each(self.attention(self.unfused)) if self.device.type == "cpu" else []
        copy, first, second, optimizer = each(self.rest())
        within, across = each(self.messages(self.ctx.tp)), each(self.messages(self.ctx.dp))
        available = (time.perf_counter() - begun) * torch.get_num_threads()
        return Measured(
            products=products,
            peaks=dict(peaks),
            copy=copy,
            fused=fused,
            unfused=unfused,
            layer_shape=Shape.of(self.model(1), self.sizes.seq),
            layer=dict(zip(self.sizes.micro_batches, (first, second), strict=True)),
            optimizer=optimizer,
            waiting=max(processor_wait() - waited, 0.0) / available,
            within=within,
            across=across,
        )

    def time(self, run: Callable[[], object]) -> float:
        """Seconds of a kernel."""
        return best_time(run, self.device, self.sizes.least_s)

    def random(self, *shape: int, dtype: Format | None = None, grad: bool = False) -> Tensor:
        """A tensor of random numbers."""
        made = torch.randn(*shape, device=self.device).to(DTYPES[dtype or self.dtype])
        return made.requires_grad_(grad)

    def products(self) -> Iterator[Product]:
        """Linear layers of all sizes, forward and backward."""
        for m, k, n in self.sizes.products:
            yield Product(m, k, n, self.time(self.layer_of(m, k, n, self.dtype)))

    def layer_of(self, m: int, k: int, n: int, dtype: Format) -> Callable[[], object]:
        """A linear layer's forward and backward pass."""
        x, w = self.random(m, k, dtype=dtype, grad=True), self.random(n, k, dtype=dtype, grad=True)
        dy = self.random(m, n, dtype=dtype)

        def run() -> None:
            x.grad = w.grad = None
            linear(x, w).backward(dy)

        return run

    def peaks(self) -> Iterator[tuple[str, float]]:
        """FLOP/s of the largest product in each format; of those that take seconds nothing is said."""
        m, k, n = max(self.sizes.products, key=math.prod)
        for dtype in OTHER_FORMATS[self.device.type]:
            yield dtype, 6 * m * k * n / self.time(self.layer_of(m, k, n, dtype))

    def attention(self, build: Callable[[Tensor, int], Callable[[], Tensor]]) -> Iterator[Attention]:
        """Causal attention over a fused projection, forward and backward."""
        for batch, seq, width in self.sizes.attention:
            heads = math.gcd(batch, 8)
            qkv = self.random(seq, batch // heads, 3 * heads * width, grad=True)
            forward = build(qkv, width)
            dy = self.random(seq, batch // heads, heads * width)

            def run(qkv: Tensor = qkv, forward: Callable[[], Tensor] = forward, dy: Tensor = dy) -> None:
                qkv.grad = None
                forward().backward(dy)

            yield Attention(batch, seq, width, self.time(run))

    def fused(self, qkv: Tensor, width: int) -> Callable[[], Tensor]:
        """Without dropout."""
        return partial(fused_attention, qkv, width, 0.0)

    def unfused(self, qkv: Tensor, width: int) -> Callable[[], Tensor]:
        """With dropout, as layers do it on a CPU."""
        seq, samples, _ = qkv.shape
        stream = DropoutStream.of_micro_batch(0, 0, samples, self.device)
        (place,) = site_keys([(0, "attention")]).to(self.device)
        drop = partial(stream.probabilities, p=DROPOUT, place=place, length=seq)
        return partial(unfused_attention, qkv, width, drop)

    def rest(self) -> Iterator[float]:
        """Bytes/s of a copy, seconds of a layer by micro-batch, and of the optimizer for each parameter."""
        source = torch.zeros(self.sizes.copy // 4, device=self.device)
        yield 2 * self.sizes.copy / self.time(partial(torch.empty_like(source).copy_, source))
        for size in self.sizes.micro_batches:
            batch, trainers = self.batch(size), (self.trainer(1, size), self.trainer(3, size))
            passes = (partial(each.compute_gradients, [batch]) for each in trainers)
            times = [best_time(run, self.device, LAYER_S) for run in passes]  # a difference needs care
            yield max(times[1] - times[0], 0.1 * times[1]) / 2
        trainer = trainers[1]
        outcome = trainer.compute_gradients([batch])
        parameters = sum(shard.parameter.numel() for shard in trainer.shards)
        yield self.time(partial(trainer.clip_and_update, outcome)) / parameters

    def model(self, layers: int) -> ModelConfig:
        """A small GPT-2 without dropout."""
        hidden = self.sizes.hidden
        return ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_heads=hidden // 64,
            max_positions=self.sizes.seq,
            vocab_size=1024,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )

    def trainer(self, layers: int, size: int) -> Trainer[Batch]:
        """The trainer of one rank alone, with micro-batches of `size`."""
        config = PretrainConfig(
            name="calibrate",
            out="",
            model=self.model(layers),
            train=TrainConfig(steps=1000, global_batch_size=size, micro_batch_size=size),
            data=DataConfig(kind="synthetic", seq_length=self.sizes.seq),
            precision=PrecisionConfig(dtype=self.dtype),
        )
        return Trainer(config, ParallelContext(device=self.device))

    def batch(self, size: int) -> Batch:
        """A micro-batch of random tokens."""
        tokens = torch.randint(1024, (size, self.sizes.seq + 1))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 0)

    def messages(self, axis: Axis) -> Iterator[Message]:
        """Collectives and transfers of all sizes over an axis, several of a size averaged."""
        if axis.size == 1:
            return
        for size in self.sizes.messages:
            times = {op: self.message(op, size, axis) for op in OPERATIONS}
            yield from (Message(op, size, axis.size, seconds) for op, seconds in times.items())

    def message(self, op: str, size: int, axis: Axis) -> float:
        """Seconds of a communication: the least of some, in each the slowest rank's."""
        count = max(size // 4 // axis.size, 1) * axis.size
        x = torch.zeros(count, device=self.device)
        run = partial(OPERATIONS[op], x, axis)
        best = math.inf
        for _ in range(2 + REPEATS * 2):
            barrier(self.ctx.world)
            synchronise(self.device)
            begin = time.perf_counter()
            run()
            synchronise(self.device)
            best = min(best, time.perf_counter() - begin)
        return best


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
