"""Every valid layout of a number of devices, and the best of them.

A layout is valid if the rules of `mlm pretrain` (parallel/layout_checks.py) hold; they are called, not
repeated. Candidates are taken in the order of a time that they cannot be below (`CostModel.bound`), so the
best are found without simulating the rest: the result is that of simulating all.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from mlm.config.suggest import divisors
from mlm.models.config import ModelConfig
from mlm.parallel.layout_checks import TRAIN_RULES, Breach, Launch, LayoutRule, LayoutValues
from mlm.plan.config import PlanLayoutsConfig
from mlm.plan.cost import CostModel, StepTime
from mlm.plan.hardware import HardwareConfig
from mlm.plan.memory import GIB, DeviceMemory, MemoryModel
from mlm.plan.shape import PlannedLayout, Shape

BATCH_KEYS = frozenset(("train.micro_batch_size", "train.global_batch_size"))
SPLIT_RULES = tuple(rule for rule in TRAIN_RULES if not BATCH_KEYS & set(rule.reads))
BATCH_RULES = tuple(rule for rule in TRAIN_RULES if rule not in SPLIT_RULES)
MOST_NODES = 1 << 17
"""Devices up to which a model that fits nowhere is tried."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """The model, batch and GPUs that layouts are searched for."""

    model: ModelConfig
    hardware: HardwareConfig
    gpus: int
    seq: int
    global_batch: int
    dtype: str = "bf16"
    imbalance: float = 1.0
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of PlannedLayout that are not searched, with their values."""

    @property
    def memory_bytes(self) -> float:
        """Memory of a device."""
        return self.hardware.for_ranks(self.gpus).memory_gib * GIB


def query_of(config: PlanLayoutsConfig) -> Query:
    """The search that the settings ask for."""
    parallel = config.parallel
    fixed = {name: getattr(parallel, name) for name in type(parallel).__dataclass_fields__}
    fixed["micro_batch"] = config.train.micro_batch_size
    return Query(
        model=config.model,
        hardware=config.hardware,
        gpus=config.gpus,
        seq=config.data.seq_length,
        global_batch=config.train.global_batch_size,
        dtype=config.precision.dtype,
        imbalance=config.imbalance,
        fixed={name: value for name, value in fixed.items() if value is not None},
    )


@dataclass(frozen=True)
class LayoutForecast:
    """A layout with its predicted step and its memory on the fullest rank."""

    layout: PlannedLayout
    step: StepTime
    memory: DeviceMemory


class Rejections:
    """The number of layouts that each rule rejected, and the first of them as an example."""

    def __init__(self) -> None:
        self.counts = Counter[LayoutRule]()
        self.first: dict[LayoutRule, str] = {}

    def add(self, rule: LayoutRule, breach: Breach) -> None:
        """Count a layout."""
        self.counts[rule] += 1
        self.first.setdefault(rule, breach.why)

    def examples(self) -> list[tuple[str, int]]:
        """An example of each rule, and how many layouts it rejected; the most frequent first."""
        return [(self.first[rule], count) for rule, count in self.counts.most_common()]


@dataclass
class SearchResult:
    """The best layouts, and what became of the others."""

    best: list[LayoutForecast]
    """Fastest first."""
    candidates: int
    """Valid layouts."""
    too_large: list[tuple[PlannedLayout, float]]
    """Layouts faster than the slowest of `best` that do not fit, with the bytes that they lack."""
    rejections: Rejections
    """Layouts that the rules do not allow."""


class Models:
    """Models of a query: of memory, and of time for each tp, which decides the vocabulary's padding."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.hardware = hardware = query.hardware.for_ranks(query.gpus)
        self.memory = MemoryModel.on(hardware, query.model, query.seq, query.dtype, query.imbalance)
        self._costs: dict[int, CostModel] = {}

    def cost(self, tp: int) -> CostModel:
        """The time model of layouts of this tp."""
        if tp not in self._costs:
            shape = Shape(self.query.model, self.query.seq, tp, self.query.imbalance)
            self._costs[tp] = CostModel(shape, self.hardware, self.query.dtype)
        return self._costs[tp]

    def forecast(self, layout: PlannedLayout) -> LayoutForecast:
        """A layout with its step and its memory."""
        return LayoutForecast(layout, self.cost(layout.tp).step(layout), self.memory.worst(layout))

    def lacks(self, layout: PlannedLayout) -> float:
        """Bytes that a layout needs beyond a device's memory; negative if it fits."""
        return self.memory.worst(layout).total - self.query.memory_bytes


def search(
    query: Query, most: int = 10, belongs: Callable[[PlannedLayout], bool] = lambda _: True
) -> SearchResult:
    """The fastest layouts that fit, of those that belong to a class."""
    models, rejections = Models(query), Rejections()
    valid = [layout for layout in layouts(query, rejections) if belongs(layout)]
    ordered = sorted((models.cost(layout.tp).bound(layout), n) for n, layout in enumerate(valid))
    best: list[LayoutForecast] = []
    too_large: list[tuple[PlannedLayout, float]] = []
    for bound, n in ordered:
        if len(best) >= most and bound > best[most - 1].step.total:
            break
        layout = valid[n]
        if (lacks := models.lacks(layout)) > 0:
            too_large.append((layout, lacks))
            continue
        best.append(models.forecast(layout))
        best.sort(key=lambda forecast: (forecast.step.total, forecast.memory.total))
    return SearchResult(best[:most], len(valid), too_large, rejections)


def layouts(query: Query, rejections: Rejections | None = None) -> Iterator[PlannedLayout]:
    """Every layout that the rules allow, each once: settings without effect stay at their defaults."""
    launch = Launch(query.gpus, None)
    for choice in splits(query, rejections):
        values = settings(query, choice)
        for layout in _batches(query, choice):
            values["train.micro_batch_size"] = layout.micro_batch
            if breach := _breach(BATCH_RULES, values, launch):
                if rejections is not None:
                    rejections.add(*breach)
                continue
            yield layout


def splits(query: Query, rejections: Rejections | None = None) -> Iterator[dict[str, Any]]:
    """Fields of layouts without their batches, as the rules allow for some batch."""
    launch = Launch(query.gpus, None)
    for choice in _splits(query):
        if breach := _breach(SPLIT_RULES, settings(query, choice), launch):
            if rejections is not None:
                rejections.add(*breach)
            continue
        yield choice


def settings(query: Query, choice: Mapping[str, Any]) -> LayoutValues:
    """The settings that the rules read, of some fields of a layout."""
    model = query.model
    return LayoutValues(
        {
            **{"cp": 1, "ep": 1, "expert_tp": None},  # plans have no context parallelism, no whole experts
            "tp_overlap": 1,  # over tp, and no products in parts
            **choice,
            "model.num_heads": model.num_heads,
            "model.options": model.options,
            "model.hidden_size": model.hidden_size,
            "model.ffn_hidden_size": model.ffn_hidden_size,
            "model.num_layers": model.num_layers,
            "model.max_positions": model.max_positions,
            "data.seq_length": query.seq,
            "train.global_batch_size": query.global_batch,
            "train.micro_batch_size": 1,
        }
    )


def _breach(
    rules: Sequence[LayoutRule], values: LayoutValues, launch: Launch
) -> tuple[LayoutRule, Breach] | None:
    return next(((rule, found) for rule in rules if (found := rule.breach(values, launch))), None)


def _splits(query: Query) -> Iterator[dict[str, Any]]:
    """Fields of layouts without their batches; those that cannot be valid too, once per number of ranks."""
    layers = query.model.num_layers
    for tp in _among(query, "tp", divisors(query.gpus)):
        for pp in _among(query, "pp", divisors(max(query.gpus // tp, 1))):
            dp = query.gpus // (tp * pp)
            if query.fixed.get("dp", dp) != dp:
                continue
            chunks = divisors(layers // pp) if 1 < pp <= layers and layers % pp == 0 else [1]
            experts = query.model.architecture.experts
            for ep, vp, pipeline, zero, sequence_parallel in product(
                _among(query, "ep", divisors(math.gcd(experts, dp)) if experts else [1]),
                _among(query, "vp", chunks),
                _among(query, "pipeline", ["1f1b", "zb_h1", "gpipe"] if pp > 1 else ["1f1b"]),
                _among(query, "zero", [0, 2, 3] if dp > 1 else [0]),
                _among(query, "sequence_parallel", [False, True] if tp > 1 else [False]),
            ):
                yield {
                    "tp": tp,
                    "pp": pp,
                    "vp": vp,
                    "dp": dp,
                    "ep": ep,
                    "pipeline": pipeline,
                    "zero": zero,
                    "sequence_parallel": sequence_parallel,
                }


def _batches(query: Query, choice: Mapping[str, Any]) -> Iterator[PlannedLayout]:
    """Layouts of a split with each micro-batch, recomputation and reduction."""
    each = query.global_batch // choice["dp"] or 1
    model, on_cpu = query.model, query.hardware.device == "cpu"
    scores = on_cpu and model.attention_dropout > 0  # elsewhere they are never kept
    recomputes = ["none", "selective", "full"] if scores else ["none", "full"]
    for micro in _among(query, "micro_batch", divisors(each)):
        sharded = choice["zero"] > 0 and each > micro
        for recompute, reduce in product(
            _among(query, "recompute", recomputes),
            _among(query, "zero_reduce", ["last", "every"] if sharded else ["last"]),
        ):
            yield PlannedLayout(
                **choice,
                recompute=recompute,
                zero_reduce=reduce,
                micro_batch=micro,
                global_batch=query.global_batch,
            )


def _among(query: Query, name: str, values: list[Any]) -> list[Any]:
    """The values to try for a field: its own if it is fixed."""
    return [query.fixed[name]] if name in query.fixed else list(values)


def least_gpus(query: Query) -> int | None:
    """The fewest devices on which some layout fits, whole nodes above one; None if there are none."""
    node = query.hardware.devices_per_node
    few = [n for n in range(1, node) if node % n == 0]
    most = node
    while most <= MOST_NODES and not _fits(replace(query, gpus=most)):
        most *= 2
    if most > MOST_NODES:
        return None
    least = most // 2 if most > node else 0
    tried = few if most == node else range(least + node, most, max(node, most // 64 // node * node))
    return next((n for n in tried if _fits(replace(query, gpus=n))), most)


def _fits(query: Query) -> bool:
    """True if a layout fits, looking at those that save most memory; any batch that its replicas divide."""
    models = Models(query)
    saving = {"recompute": "full", "zero_reduce": "every", "pipeline": "1f1b", "vp": 1, "micro_batch": 1}
    for choice in _splits(replace(query, fixed={**saving, **query.fixed})):
        dp = choice["dp"]
        each = replace(
            query, global_batch=dp * max(1, query.global_batch // dp), fixed={**saving, **query.fixed}
        )
        if _breach(TRAIN_RULES, settings(each, choice), Launch(query.gpus, None)):
            continue
        if any(models.lacks(layout) <= 0 for layout in _batches(each, choice)):
            return True
    return False
