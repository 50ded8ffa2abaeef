"""This rank's part of a model, and passes of micro-batches through all stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mlm.convert.huggingface.families import layer_names
from mlm.data.sampler import MicroBatch
from mlm.models.backbone import Transformer
from mlm.models.config import NO_ADAPTERS, LoraConfig, ModelConfig
from mlm.models.family import Objective, family_of
from mlm.models.lora import add_adapters, freeze_base
from mlm.models.stage import PipelineStage, split_layers
from mlm.optim.config import PrecisionConfig
from mlm.optim.precision import DTYPES, parameter_dtype
from mlm.parallel.collectives import all_reduce, to_device
from mlm.parallel.compute_state import CachedHalfParams, DeferredWeightGrads
from mlm.parallel.config import ParallelConfig
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.nf4 import weight_format
from mlm.parallel.pipeline.actions import Instruction
from mlm.parallel.pipeline.engine import ChunkGradients, PlanObserver, Stages, run_plan
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule, forward_only
from mlm.training.kernels import without_cudnn_attention


class HasTokens(Protocol):
    @property
    def tokens(self) -> Tensor: ...


T = TypeVar("T", bound=HasTokens)
B = TypeVar("B", bound=MicroBatch)

EVAL_ROUNDS = 4
"""Micro-batches per pipeline rank that a pass without gradients takes through the stages at a time."""


class PipelinedModel:
    """This rank's chunks of a model, in the order a micro-batch passes them.

    Attributes:
        chunks: one module for each of `stages`; the full model when pp = vp = 1. By default the layers are
            split evenly over the virtual stages of all ranks.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
        ctx: ParallelContext,
        lora: LoraConfig = NO_ADAPTERS,
        stages: Sequence[PipelineStage] | None = None,
    ) -> None:
        self.ctx, self.pipeline, self.num_chunks = ctx, parallel.pipeline, parallel.vp
        self.dtype, self.vocab_size = DTYPES[precision.dtype], model.vocab_size
        if stages is None:
            stages = split_layers(model.num_layers, ctx.pp.size * parallel.vp)[ctx.pp.rank :: ctx.pp.size]
        master_dtype = parameter_dtype(precision)
        dtype = self.dtype if lora.rank else master_dtype
        with torch.device(ctx.device), default_dtype(dtype), weight_format(lora.quantize):
            self.chunks = [
                family_of(model.kind)
                .model(
                    model,
                    tp=ctx.tp,
                    dtype=self.dtype,
                    recompute=parallel.recompute,
                    sequence_parallel=parallel.sequence_parallel,
                    stage=stage,
                    cp=ctx.cp,
                    experts=ctx.experts,
                )
                .to(dtype)
                for stage in stages
            ]
        if lora.rank:
            with torch.device(ctx.device), default_dtype(master_dtype):
                for chunk in self.chunks:
                    add_adapters(chunk, lora, layer_names(model))
                    freeze_base(chunk, master_dtype)
        self.deferred = [DeferredWeightGrads() for _ in self.chunks]
        for chunk, deferred in zip(self.chunks, self.deferred, strict=True):
            inside_layers = set(chunk.layers.modules())
            for module in chunk.modules():
                if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                    module.compute.overlap_chunks = parallel.tp_overlap or 1
                    module.compute.fp8 = precision.dtype == "fp8" and module in inside_layers
                    if self.defers_weight_grads:
                        module.compute.deferred = deferred
        half = self.dtype in (torch.bfloat16, torch.float16)
        casts = half and precision.cast == "step" and not (parallel.zero and ctx.replicas.group is not None)
        self.casts = CachedHalfParams(
            chain(*(chunk.modules() for chunk in self.chunks)) if casts else (), self.dtype
        )
        self.replays = False
        """True if layers are replayed as CUDA graphs, which need to know where a micro-batch begins."""
        self.polled: Callable[[Iterable[Any]], Iterable[Any]] = iter
        """Yields the batches of `evaluate`; may raise between them, on all ranks."""
        self._plans: dict[tuple[bool, int], tuple[Sequence[Instruction], float]] = {}

    @property
    def defers_weight_grads(self) -> bool:
        """True if weight gradients are computed after their backward pass."""
        return self.pipeline == "zb_h1"

    @property
    def is_last(self) -> bool:
        return self.ctx.pp.rank == self.ctx.pp.size - 1

    def instructions(self, micro_batches: int, *, train: bool) -> Sequence[Instruction]:
        return self._plan(micro_batches, train)[0]

    def bubble(self, micro_batches: int) -> float:
        """Idle over ideal time of a training step; a backward pass counts as two forward passes."""
        return self._plan(micro_batches, True)[1]

    def _plan(self, micro_batches: int, train: bool) -> tuple[Sequence[Instruction], float]:
        """This rank's part of a plan, and the bubble. Cached, as a simulation takes seconds at p = 64."""
        key = (train, micro_batches)
        if key not in self._plans:
            p, v = self.ctx.pp.size, self.num_chunks
            schedule = (
                build_schedule(self.pipeline, stages=p, chunks=v, micro_batches=micro_batches)
                if train
                else forward_only(p, v, micro_batches)
            )
            plan = lower(schedule)
            self._plans[key] = plan.instructions[self.ctx.pp.rank], plan.bubble
        return self._plans[key]

    def train(
        self,
        batches: Sequence[B],
        objective: Objective[Transformer, B],
        scale: Tensor,
        stream: Callable[[B], DropoutStream | None],
        gradients: Sequence[ChunkGradients] = (),
        observer: PlanObserver | None = None,
    ) -> list[Tensor]:
        """Run forward and backward of a step's micro-batches.

        Returns the last stage's outputs, `scale` times each part of the objective; nothing on other ranks.
        `stream` returns a micro-batch's dropout; `gradients` accumulates the gradients of each chunk.
        """

        def forward(chunk: Transformer, batch: B, x: Tensor | None) -> Tensor:
            return objective.output(chunk, batch, scale, stream(batch), x)

        stages: Stages[B] = self._stages(forward, gradients, observer)
        with self.casts.casting(trains=True):
            return run_plan(stages, self.instructions(len(batches), train=True), batches)

    def evaluate(
        self, batches: Iterable[T], forward: Callable[[Transformer, T, Tensor | None], Tensor]
    ) -> Iterator[tuple[T, Tensor]]:
        """Yield each micro-batch with its output on the last stage; nothing on other ranks. No gradients.

        forward(chunk, micro-batch, hidden states of the previous stage or None) returns a chunk's output.
        """
        group_size = 1 if self.ctx.pp.size == 1 else EVAL_ROUNDS * self.ctx.pp.size
        remaining, stages = iter(self.polled(batches)), self._stages(forward)
        while group := list(islice(remaining, group_size)):
            with self.casts.casting(trains=False), without_cudnn_attention(self.ctx.device):
                results = run_plan(stages, self.instructions(len(group), train=False), group)
            if self.is_last:
                yield from zip(group, results, strict=True)

    def _stages(
        self,
        forward: Callable[[Transformer, T, Tensor | None], Tensor],
        gradients: Sequence[ChunkGradients] = (),
        observer: PlanObserver | None = None,
    ) -> Stages[T]:
        def run(chunk: int, batch: T, x: Tensor | None) -> Tensor:
            if self.replays:  # outputs of earlier micro-batches in the graphs' memory may be overwritten
                torch.compiler.cudagraph_mark_step_begin()
            return forward(self.chunks[chunk], batch, x)

        return Stages(
            pp=self.ctx.pp,
            num_stages=self.ctx.pp.size * self.num_chunks,
            forward=run,
            boundary_shape=lambda batch: self.chunks[0].boundary_shape(batch.tokens),
            dtype=self.dtype,
            device=self.ctx.device,
            gradients=gradients,
            observer=observer or PlanObserver(),
        )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def evaluate(
    model: PipelinedModel, objective: Objective[Transformer, B], batches: Iterable[B]
) -> tuple[list[float], list[int]]:
    """Return means of the objective's metrics over all replicas' batches, and the counts of their terms.

    Summed in float64, so that the score does not depend on the assignment of samples. Collective over all
    ranks, and the same on each.
    """
    ctx = model.ctx
    sums = torch.zeros(2, len(objective.metrics), dtype=torch.float64, device=ctx.device)
    for batch, result in model.evaluate(batches, objective.sums):
        sums[0] += result
        if ctx.cp.rank == 0:  # counts are of whole sequences, sums of this rank's tokens
            sums[1] += to_device(torch.tensor(objective.counts(batch), dtype=torch.float64), ctx.device)
    totals, counts = all_reduce(all_reduce(sums, ctx.replicas), ctx.pp).tolist()
    return [total / max(1, n) for total, n in zip(totals, counts, strict=True)], [int(n) for n in counts]
