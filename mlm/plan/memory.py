"""Memory of one device at its peak, by part.

Weights, gradients and optimizer state are counted tensor by tensor and exact. Activations are what this
toolkit's layers keep for backward, after table 2 of arXiv:2205.05198 with fused attention, times the pairs of
chunk and micro-batch that the schedule has in flight; on top comes what one layer's backward, or the
vocabulary projection, needs for a moment. The guide Planning lists the terms.

Letters as in shape.py; e is the bytes of an activation.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal

from mlm.models.config import ModelConfig
from mlm.models.family import SHIPPED
from mlm.models.stage import PipelineStage, parameter_home, split_layers
from mlm.parallel.chunks import chunk_rows
from mlm.plan.cost import ELEMENT_BYTES
from mlm.plan.hardware import HardwareConfig
from mlm.plan.shape import PlannedLayout

GIB = 2**30
PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "cast weights",
    "activations",
    "vocabulary",
    "communication",
    "allocator",
)
"""Parts of a device's memory, in the order they are shown."""
MOMENTS = ("backward", "optimizer")
"""Moments at which a device may be at its fullest: as backward begins, or as the optimizer steps."""
SENDS_KEPT = 8
"""Sends of the pipeline that may be under way (parallel/pipeline/engine.py)."""
TABLE = "token.weight"
"""The parameter that a tied model's last stage holds too."""
ALLOCATOR = 0.04
"""Share of what comes and goes in a step that the allocator loses to rounding and fragments."""


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter as one tensor-parallel rank holds it."""

    name: str
    rows: int
    columns: int = 1
    sharded_over: Literal["dp", "expert replicas", "nothing"] = "dp"
    """With zero=2 or 3."""

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * self.columns

    def share(self, rank: int, ranks: int, ep: int) -> int:
        """Elements of one data-parallel rank's rows: dim 0 is split as torch.chunk does."""
        if self.sharded_over == "nothing":
            return self.size
        if self.sharded_over == "expert replicas":
            rank, ranks = rank // ep, ranks // ep
        each = -(-self.rows // ranks)
        return min(each, self.rows - min(rank * each, self.rows)) * self.columns


def parameter_parts(model: ModelConfig, tp: int, ep: int) -> dict[int | str, list[Part]]:
    """The parameters of a tensor-parallel rank by home: a layer's number, or the first or last stage.

    Layers between the first and the last are taken to be like the last, those without experts like the first.
    """
    import torch  # the list of commands needs none

    from mlm.parallel.expert.router import Router
    from mlm.parallel.mesh import Axis, ExpertAxes
    from mlm.parallel.sharding import parameter_shards

    axis = Axis("tp", 0, tp)
    parts = defaultdict[int | str, list[Part]](list)
    with torch.device("meta"):
        ends = PipelineStage(range(0, model.num_layers, max(1, model.num_layers - 1)), True, True)
        experts = ExpertAxes(Axis("ep", 0, ep), axis)
        module = model.family.model(model, tp=axis, stage=ends, experts=experts)
    for shard in parameter_shards(module, axis):
        rows, *columns = shard.part_shape
        over: Any = "expert replicas" if shard.experts else "dp"
        over = "nothing" if isinstance(shard.module, Router) else over
        parts[parameter_home(shard.name)].append(Part(shard.name, rows, math.prod(columns), over))
    last, dense = model.num_layers - 1, model.architecture.dense_layers
    return {**parts, **{n: parts[0 if n < dense else last] for n in range(1, last)}}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device at its fullest moment."""

    parts: dict[str, float]
    """Bytes by PARTS."""
    moment: str
    """One of MOMENTS."""
    parameters: int
    """Elements that the device holds."""

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.parts.values())


class MemoryModel:
    """Memory of layouts of one model, in one precision, on one type of device."""

    def __init__(
        self,
        model: ModelConfig,
        seq: int,
        dtype: str = "bf16",
        *,
        device: str = "gpu",
        reserved: float = 0.0,
        imbalance: float = 1.0,
    ) -> None:
        self.model, self.seq, self.device, self.reserved = model, seq, device, reserved
        self.imbalance = imbalance
        self.element = ELEMENT_BYTES[dtype]
        self.master = max(4, self.element)
        self.casts = self.element < 4
        self._parts: dict[tuple[int, int], dict[int | str, list[Part]]] = {}
        self._held: dict[tuple[object, ...], HeldParameters] = {}

    @classmethod
    def on(
        cls, hardware: HardwareConfig, model: ModelConfig, seq: int, dtype: str, imbalance: float = 1.0
    ) -> "MemoryModel":
        """Memory of layouts on this hardware."""
        reserved = hardware.reserved_gib * GIB
        return cls(model, seq, dtype, device=hardware.device, reserved=reserved, imbalance=imbalance)

    def peak(self, layout: PlannedLayout, stage_rank: int = 0, dp_rank: int = 0) -> DeviceMemory:
        """The peak of a device on pipeline rank `stage_rank` and data-parallel rank `dp_rank`."""
        held = self.held(layout, stage_rank, dp_rank)
        moving = StepMemory(self, layout, stage_rank, held)
        begins, ends = moving.backward_begins(), moving.optimizer_steps()
        moment = "backward" if sum(begins.values()) >= sum(ends.values()) else "optimizer"
        parts = begins if moment == "backward" else ends
        loose = sum(parts[name] for name in ("activations", "vocabulary", "communication", "cast weights"))
        parts["allocator"] = self.reserved + ALLOCATOR * loose
        if self.device == "cpu":
            # the heap keeps what other phases freed, about a gradient each: few of the blocks fit activations
            parts["allocator"] += held.parameters * self.master
        return DeviceMemory({name: float(parts[name]) for name in PARTS}, moment, held.parameters)

    def worst(self, layout: PlannedLayout) -> DeviceMemory:
        """The peak of the fullest pipeline rank; it is at one of the two ends, or next to the first."""
        ranks = {0, layout.pp - 1, min(1, layout.pp - 1)}
        return max((self.peak(layout, rank) for rank in sorted(ranks)), key=lambda peak: peak.total)

    def stages(self, layout: PlannedLayout, stage_rank: int) -> list[PipelineStage]:
        """The chunks of a pipeline rank."""
        return list(_stages(self.model.num_layers, layout.pp * layout.vp)[stage_rank :: layout.pp])

    def held(self, layout: PlannedLayout, stage_rank: int, dp_rank: int = 0) -> "HeldParameters":
        """Elements of parameters of one device."""
        shards = layout.dp if layout.zero else 0
        key = (layout.tp, layout.ep, layout.pp, layout.vp, shards, stage_rank, dp_rank)
        if key not in self._held:
            self._held[key] = self._count(layout, stage_rank, dp_rank)
        return self._held[key]

    def _count(self, layout: PlannedLayout, stage_rank: int, dp_rank: int) -> "HeldParameters":
        split = (layout.tp, layout.ep)
        homes = self._parts[split] = self._parts.get(split) or parameter_parts(self.model, *split)
        ends = list[Part]()
        layers = list[list[Part]]()
        for stage in self.stages(layout, stage_rank):
            layers += [homes[layer] for layer in stage.layers]
            ends += homes["first"] if stage.is_first else []
            ends += homes["last"] if stage.is_last else []
            if stage.is_last and not stage.is_first and self.model.is_tied:
                ends += [part for part in homes["first"] if part.name == TABLE]
        parts = [*chain(*layers), *ends]
        whole = sum(part.size for part in parts)
        return HeldParameters(
            parameters=sum(part.share(dp_rank, layout.dp, layout.ep) for part in parts)
            if layout.zero
            else whole,
            whole=whole,
            tensors=len(parts),
            layer=max(sum(part.size for part in layer) for layer in layers),
            ends=sum(part.size for part in ends),
            layers=len(layers),
        )


@cache
def _stages(layers: int, stages: int) -> tuple[PipelineStage, ...]:
    return tuple(split_layers(layers, stages))


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """Elements of parameters on one device."""

    parameters: int
    """Of sharded ones this rank's rows."""
    whole: int
    """Of the tensor-parallel part, before sharding over dp."""
    tensors: int
    layer: int
    """Of the largest layer, before sharding."""
    ends: int
    """Outside the layers, before sharding."""
    layers: int


class StepMemory:
    """The memory that comes and goes in a step, on one device of a layout."""

    def __init__(
        self, memory: MemoryModel, layout: PlannedLayout, stage_rank: int, held: HeldParameters
    ) -> None:
        self.memory, self.layout, self.stage_rank, self.held = memory, layout, stage_rank, held
        self.e, self.h, self.t = memory.element, memory.model.hidden_size, layout.tp
        self.f = memory.model.ffn_size // layout.tp
        self.sizes = sizes = memory.model.architecture
        self.moved = memory.imbalance * sizes.experts_per_token
        """Rows of this rank's experts for each of its tokens."""
        if sizes.experts:
            self.f = round((self.moved * sizes.expert_size + sizes.shared_size) / layout.tp)
        self.queries = memory.model.num_heads * sizes.head_dim // layout.tp
        self.kv = sizes.kv_size(layout.tp)
        self.ups = 2 if sizes.gated else 1
        self.rows = memory.seq * layout.micro_batch
        self.split = layout.tp if layout.sequence_parallel else 1
        self.is_first, self.is_last = stage_rank == 0, stage_rank == layout.pp - 1

    def backward_begins(self) -> dict[str, float]:
        """Bytes by part when most micro-batches are in flight."""
        vocabulary, chunk = self._vocabulary() if self.is_last else (0.0, 0.0)
        working = self._backward_of_a_layer()  # never at the same time as a chunk of logits
        return {
            **self._static(),
            "gradients": float(self._gradients_before() * self.memory.master),
            "cast weights": self._gathered(),
            "activations": self._in_flight() + working,
            "vocabulary": vocabulary + max(chunk - working, 0.0),
            "communication": self._communication() + (self._unit_buffers() if self.layout.zero else 0.0),
            "allocator": 0.0,
        }

    def optimizer_steps(self) -> dict[str, float]:
        """Bytes by part when the gradients are complete and the activations are gone."""
        model, layout = self.memory.model, self.layout
        tied = layout.pp > 1 and model.is_tied and (self.is_first or self.is_last)
        table = model.padded_vocab_size(self.t) // self.t * self.h if tied else 0
        return {
            **self._static(),
            "gradients": float(self.held.parameters * self.memory.master),
            "cast weights": self._gathered() if layout.zero == 0 else 0.0,
            "activations": 0.0,
            "vocabulary": 0.0,
            "communication": float(table * self.memory.master),
            "allocator": 0.0,
        }

    def _static(self) -> dict[str, float]:
        held, master = self.held, self.memory.master
        return {
            "weights": float(held.parameters * master),
            "optimizer": float(2 * held.parameters * master + 4 * held.tensors),
        }

    def _gradients_before(self) -> int:
        """Elements of gradients that exist when the backward pass with most activations begins."""
        layout, held = self.layout, self.held
        if layout.zero == 0 and layout.dp > 1:
            return held.whole  # flat buffers
        alone = layout.micro_batches == 1
        if layout.zero == 0:
            table = self._table if self.is_last and self._fuses_embedding_grad else 0
            return table if alone else held.whole
        if layout.zero_reduce == "every":
            return 0 if alone else held.parameters
        return 0 if alone else held.whole

    def _gathered(self) -> float:
        """Weights in the dtype of activations: cast once a step, or gathered from data-parallel ranks."""
        layout, held, e = self.layout, self.held, self.e
        if layout.zero == 0:
            learned = self.is_first and self.sizes.learned_positions
            positions = self.memory.model.max_positions * self.h if learned else 0  # are not cast
            return float(e * (held.whole - positions)) if self.memory.casts else 0.0
        if layout.zero == 2:
            return float(e * held.whole)
        return float(e * (held.ends + min(2, held.layers) * held.layer))

    def _unit_buffers(self) -> float:
        """Of the largest unit: the gathered message, and its gradient before and after reduction."""
        unit = max(self.held.layer, self.held.ends)
        return float(unit * (self.e + self.memory.master))

    @cached_property
    def _kept(self) -> float:
        """Bytes that one layer keeps of one micro-batch, nothing recomputed."""
        model, e, h, t, f = self.memory.model, self.e, self.h, self.t, self.f
        split = self.split
        per_token = 4 * e * h / split  # inputs of norms and of column-parallel products
        per_token += (2 * h / split) if model.hidden_dropout else 0  # masks
        # queries, keys, values; the MLP's inner ones, of which a gated one has three
        per_token += e * (self.queries + 2 * self.kv) + (self.ups + 1) * e * f
        per_token += e * self.queries  # attention's output
        per_token += (16 if self.sizes.norm_bias else 8) / split  # norms' statistics
        per_token += 2 * e * h * self.moved  # rows into experts and out of them
        if self.sizes.experts and self.memory.casts:
            per_token += 4 * h / split  # the router reads float32
        if self.sizes.head_norms:
            # inputs of the norms of heads, and a number for each head
            per_token += (self.queries + self.kv) * (e + 4 / self.sizes.head_dim)
        scores = 0.0
        if self.memory.device == "cpu" and model.attention_dropout:
            per_score = 0 if self.layout.recompute == "selective" else 2 * e + 1
            scores = per_score * model.num_heads / t * self.memory.seq * self.rows
        else:
            per_token += 4 * model.num_heads / t  # log-sum-exp
        return self.rows * per_token + scores

    def _in_flight(self) -> float:
        """Activations of all micro-batches in flight, and of the layer that is recomputed."""
        layout, stages = self.layout, self.memory.stages(self.layout, self.stage_rank)
        pairs = in_flight(layout, self.stage_rank)
        layers = sum(len(stage.layers) for stage in stages) / len(stages)
        edge = self.rows * self.h
        ends = 0.0
        if self.is_first:
            ends += self.rows * (8 + (1 if layout.tp > 1 else 0))
            ends += edge / self.split if self.memory.model.hidden_dropout else 0
        ends *= pairs / len(stages)
        if self.is_last:
            ends += last_in_flight(layout) * self.e * edge / self.split  # input of the final norm
        if layout.recompute == "full":
            return pairs * layers * self.e * edge / self.split + ends + self._kept
        return pairs * layers * self._kept + ends

    def _backward_of_a_layer(self) -> float:
        """Gradients inside the MLP, and its weight's gradient before it is added."""
        e, f = self.e, self.f
        width = max(f, self.sizes.experts // self.layout.ep * self.sizes.expert_size // self.t)
        weight = (
            self.ups * width * self.h * ((e + 4) if self.memory.casts and self.layout.zero == 0 else 2 * e)
        )
        return self.rows * e * (2 * self.h * (1 + self.moved) + (self.ups + 1) * f) + weight

    @property
    def _table(self) -> int:
        """Elements of the table of the vocabulary projection."""
        return self.memory.model.padded_vocab_size(self.t) // self.t * self.h

    @property
    def _fuses_embedding_grad(self) -> bool:
        """True if the loss adds the table's gradient to the sum when it computes it (training/trainer.py)."""
        return self.layout.zero == 0 and self.memory.model.kind in SHIPPED

    def _vocabulary(self) -> tuple[float, float]:
        """Bytes kept from forward to backward by the projection, and those of a chunk of logits."""
        model, layout, e = self.memory.model, self.layout, self.e
        columns = model.padded_vocab_size(self.t) // self.t
        rows = max(1, round(model.family.scored * self.rows))
        gradient = self.memory.master * self._table
        kept = last_in_flight(layout) * (e * rows * self.h + (0 if self._fuses_embedding_grad else gradient))
        device = "cuda" if self.memory.device == "gpu" else "cpu"
        chunk, block = chunk_rows(rows, columns, device, half=self.memory.casts)
        logits = columns * (block * max(4, e) + (chunk * e if self.memory.casts else 0))
        logits += columns * block * max(4, e) if device == "cpu" else 0  # probabilities beside them, unfused
        # the sum over chunks, unless it is kept or becomes the gradient; of several, a product beside it
        is_added = self._fuses_embedding_grad and (layout.dp > 1 or layout.micro_batches > 1)
        # until the first backward pass copies the gradient to its bucket, it lies beside that
        is_apart = is_added and layout.dp > 1 and last_in_flight(layout) > 1
        return float(kept), float(logits + ((rows > chunk) + is_added + is_apart) * gradient)

    def _communication(self) -> float:
        """Boundary tensors of the pipeline under way, and sequences gathered over tp."""
        layout, boundary = self.layout, self.e * self.rows * self.h / self.split
        size = 0.0
        if layout.pp > 1:
            size += boundary * (min(SENDS_KEPT, layout.micro_batches) + 2)
        if layout.sequence_parallel:
            size += 2 * self.e * self.rows * self.h
        return size


def in_flight(layout: PlannedLayout, stage_rank: int) -> int:
    """Pairs of chunk and micro-batch whose activations a pipeline rank holds (pipeline/schedules.py)."""
    p, v, m = layout.pp, layout.vp, layout.micro_batches
    if layout.pipeline == "gpipe":
        return v * m
    if layout.pipeline == "zb_h1":
        return min(p, m)
    if v == 1:
        return min(p - stage_rank, m)
    return min((v + 1) * p - 2 * stage_rank - 1, v * m)


def last_in_flight(layout: PlannedLayout) -> int:
    """Micro-batches between the loss and its backward on the last stage."""
    return layout.micro_batches if layout.pipeline == "gpipe" else 1


def gib(size: float) -> str:
    """Bytes as `3.1 GiB`."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{math.ceil(size / 2**20)} MiB"
