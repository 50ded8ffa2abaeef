"""Every valid layout of a number of devices, without torch.

A layout is valid if the rules of `mlm pretrain` (parallel/layout_checks.py) hold; they are called, not
repeated.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from mlm.config.suggest import divisors
from mlm.config.tree import values_of
from mlm.models.config import ModelConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.layout_checks import TRAIN_RULES, Breach, Launch, LayoutRule, LayoutValues
from mlm.plan.config import PlanLayoutsConfig
from mlm.plan.hardware import HardwareConfig
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import GIB
from mlm.training.checks import context_problem
from mlm.training.config import PretrainConfig, TrainConfig

CONTEXT_SIZES = (1, 2, 4, 8)
"""Values of cp that are searched."""
BATCH_KEYS = frozenset(("train.micro_batch_size", "train.global_batch_size"))
SPLIT_RULES = tuple(rule for rule in TRAIN_RULES if not BATCH_KEYS & set(rule.reads))
BATCH_RULES = tuple(rule for rule in TRAIN_RULES if rule not in SPLIT_RULES)


@dataclass(frozen=True, kw_only=True)
class Query:
    """The run and GPUs that layouts are searched for."""

    run: PretrainConfig
    """Its layout and micro-batch are what is searched."""
    hardware: HardwareConfig
    gpus: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of PlannedLayout that are not searched, with their values."""

    @property
    def model(self) -> ModelConfig:
        """The run's model."""
        return self.run.model

    @property
    def seq(self) -> int:
        """Tokens of a sample."""
        return self.run.data.seq_length

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.run.train.global_batch_size

    def with_batch(self, size: int) -> "Query":
        """The same with another global batch."""
        train = replace(self.run.train, global_batch_size=size)
        return replace(self, run=replace(self.run, train=train))

    @cached_property
    def values(self) -> dict[str, Any]:
        """The run's settings by key."""
        return values_of(self.run)

    @property
    def memory_bytes(self) -> float:
        """Memory of a device."""
        return self.hardware.for_ranks(self.gpus).memory_gib * GIB


def query_of(config: PlanLayoutsConfig) -> Query:
    """The search that the settings ask for."""
    parallel, train = config.parallel, {n: getattr(config.train, n) for n in TrainConfig.__slots__}
    fixed = {name: getattr(parallel, name) for name in type(parallel).__dataclass_fields__}
    fixed["micro_batch"] = config.train.micro_batch_size
    shared = {name: getattr(config, name) for name in PretrainConfig.__slots__}
    train["micro_batch_size"] = train["micro_batch_size"] or 1
    shared |= {"out": "", "parallel": ParallelConfig(), "train": TrainConfig(**train)}
    return Query(
        run=PretrainConfig(**shared),
        hardware=config.hardware,
        gpus=config.gpus,
        fixed={name: value for name, value in fixed.items() if value is not None},
    )


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


def layouts(query: Query, rejections: Rejections | None = None) -> Iterator[PlannedLayout]:
    """Every layout that the rules allow, each once: settings without effect stay at their defaults."""
    launch = Launch(query.gpus, None)
    for choice in splits(query, rejections):
        values = settings(query, choice)
        for layout in batches(query, choice):
            values["train.micro_batch_size"] = layout.micro_batch
            if breach := first_breach(BATCH_RULES, values, launch):
                if rejections is not None:
                    rejections.add(*breach)
                continue
            yield layout


def splits(query: Query, rejections: Rejections | None = None) -> Iterator[dict[str, Any]]:
    """Fields of layouts without their batches, as the rules allow for some batch."""
    launch = Launch(query.gpus, None)
    for choice in all_splits(query):
        if breach := first_breach(SPLIT_RULES, settings(query, choice), launch):
            if rejections is not None:
                rejections.add(*breach)
            continue
        yield choice


def settings(query: Query, choice: Mapping[str, Any]) -> LayoutValues:
    """The settings that the rules read, of some fields of a layout."""
    return LayoutValues({**query.values, **choice, "train.micro_batch_size": 1})


def first_breach(
    rules: Sequence[LayoutRule], values: LayoutValues, launch: Launch
) -> tuple[LayoutRule, Breach] | None:
    """The first rule that settings break, and how; None if they keep all."""
    return next(((rule, found) for rule in rules if (found := rule.breach(values, launch))), None)


def all_splits(query: Query) -> Iterator[dict[str, Any]]:
    """Fields of layouts without their batches; those that cannot be valid too, once per number of ranks."""
    layers, experts = query.model.num_layers, query.model.architecture.experts
    for tp, cp in product(
        _among(query, "tp", divisors(query.gpus)), _among(query, "cp", _context_sizes(query))
    ):
        for pp in _among(query, "pp", divisors(max(query.gpus // (tp * cp), 1))):
            dp = query.gpus // (tp * cp * pp)
            if query.fixed.get("dp", dp) != dp or (cp > 1 and tp * cp * pp * dp != query.gpus):
                continue
            chunks = divisors(layers // pp) if 1 < pp <= layers and layers % pp == 0 else [1]
            for vp, pipeline, zero, sequence_parallel, overlap in product(
                _among(query, "vp", chunks),
                _among(query, "pipeline", ["1f1b", "zb_h1", "gpipe"] if pp > 1 else ["1f1b"]),
                _among(query, "zero", [0, 2, 3] if dp * cp > 1 else [0]),
                _among(query, "sequence_parallel", [False, True] if tp > 1 else [False]),
                _among(query, "tp_overlap", [1]),
            ):
                for expert_tp, ep in _expert_splits(query, tp, dp * cp, sequence_parallel, experts):
                    yield {
                        "tp": tp,
                        "pp": pp,
                        "vp": vp,
                        "dp": dp,
                        "cp": cp,
                        "ep": ep,
                        "expert_tp": expert_tp,
                        "sequence_parallel": sequence_parallel,
                        "tp_overlap": overlap,
                        "pipeline": pipeline,
                        "zero": zero,
                    }


def _context_sizes(query: Query) -> list[int]:
    """Ranks that split a sequence where none are typed.

    Where attention has no dropout: else no fused kernel serves the blocks of several ranks. Of mixtures none:
    each split of their experts is counted apart.
    """
    model = query.model
    is_whole = context_problem(2, model, query.run.data) is not None
    if is_whole or model.attention_dropout or model.architecture.experts:
        return [1]
    return [cp for cp in CONTEXT_SIZES if query.gpus % cp == 0 and (cp == 1 or query.seq % (2 * cp) == 0)]


def _expert_splits(
    query: Query, tp: int, replicas: int, sequence_parallel: bool, experts: int
) -> Iterator[tuple[int | None, int]]:
    """Values of expert_tp and ep."""
    for expert_tp in _among(query, "expert_tp", [None]):
        ranks = replicas * (tp if expert_tp == 1 else 1)
        for ep in _among(query, "ep", divisors(math.gcd(experts, ranks)) if experts else [1]):
            yield expert_tp, ep


def batches(query: Query, choice: Mapping[str, Any]) -> Iterator[PlannedLayout]:
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
