"""Valid layouts of a number of devices, by the rules of `mlm pretrain` (launch/rules/layout.py). No torch."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from mlm.config.suggest import divisors
from mlm.config.tree import values_of
from mlm.launch.rules.layout import TRAIN_RULES, Launch, LayoutRule, LayoutValues, Violation
from mlm.models.shape import architecture_of
from mlm.parallel.config import ParallelConfig
from mlm.plan.config import PlanLayoutsConfig
from mlm.plan.hardware import GIB, HardwareConfig
from mlm.plan.layout import BATCH_NAMES, PlannedLayout
from mlm.runs.checks import context_problem
from mlm.runs.config import PretrainConfig


@dataclass(frozen=True, kw_only=True)
class Query:
    """A run, and the GPUs to find layouts for."""

    run: PretrainConfig
    """The search replaces its layout and micro-batch size."""
    hardware: HardwareConfig
    """One device of `gpus`, after `HardwareConfig.for_ranks`."""
    gpus: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of the fields of PlannedLayout that are not searched."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hardware", self.hardware.for_ranks(self.gpus))

    @cached_property
    def values(self) -> dict[str, Any]:
        """The run's settings by key."""
        return values_of(self.run)

    @property
    def memory_bytes(self) -> float:
        return self.hardware.memory_gib * GIB


def query_of(config: PlanLayoutsConfig) -> Query:
    micro, parallel = config.train.micro_batch_size, config.parallel
    fixed = {"micro_batch": micro, **{f.name: getattr(parallel, f.name) for f in fields(ParallelConfig)}}
    if parallel.recompute != "budget":
        del fixed["recompute_budget"]  # a default, without effect
    train = replace(config.train, micro_batch_size=micro or 1)
    return Query(
        run=replace(config, parallel=ParallelConfig(), train=train),  # type: ignore[arg-type]
        hardware=config.hardware,
        gpus=config.gpus,
        fixed={name: value for name, value in fixed.items() if value is not None},
    )


FIELDS = (
    *("tp", "cp", "pp", "dp", "vp", "pipeline", "zero", "sequence_parallel", "tp_overlap", "expert_tp"),
    *("ep", "micro_batch", "recompute", "recompute_budget", "zero_reduce"),
)
"""Fields of a layout in the order in which they are chosen."""
Choice = dict[str, Any]
"""Values of the first few of FIELDS."""


def options(name: str, query: Query, c: Choice) -> list[Any]:
    """Return the values to try for a field, by the fields before it; one for a setting without effect."""
    model = query.run.model
    experts = architecture_of(model).experts
    if name == "tp":
        return divisors(query.gpus)
    if name == "cp":
        # No fused kernel drops attention over several ranks. Mixtures are not searched: each split of their
        # experts needs counts of its own.
        is_split = context_problem(2, model, query.run.data) is None
        if not is_split or model.attention_dropout or experts:
            return [1]
        return [cp for cp in (1, 2, 4, 8) if query.gpus % cp == 0]
    if name == "pp":
        return divisors(max(query.gpus // (c["tp"] * c["cp"]), 1))
    if name == "dp":
        return [max(query.gpus // (c["tp"] * c["cp"] * c["pp"]), 1)]
    if name == "vp":
        layers, pp = model.num_layers, c["pp"]
        return divisors(layers // pp) if 1 < pp <= layers and layers % pp == 0 else [1]
    if name == "pipeline":
        return ["1f1b", "zb_h1", "gpipe"] if c["pp"] > 1 else ["1f1b"]
    if name == "zero":
        return [0, 2, 3] if c["dp"] * c["cp"] > 1 else [0]
    if name == "sequence_parallel":
        return [False, True] if c["tp"] > 1 else [False]
    if name == "ep":
        ranks = c["dp"] * c["cp"] * (c["tp"] if c["expert_tp"] == 1 else 1)
        return divisors(math.gcd(experts, ranks)) if experts else [1]
    samples = query.run.train.global_batch_size // c["dp"] or 1  # of a replica in a step
    if name == "micro_batch":
        return divisors(samples)
    if name == "recompute":  # scores are kept only where attention is not fused
        keeps_scores = query.hardware.device == "cpu" and model.attention_dropout > 0
        return ["none", "selective", "full"] if keeps_scores else ["none", "full"]
    if name == "zero_reduce":
        return ["last", "every"] if c["zero"] and samples > c["micro_batch"] else ["last"]
    if name == "recompute_budget":
        return [query.run.parallel.recompute_budget]
    return [None]  # tp_overlap and expert_tp


def layouts(query: Query, rejected: list[str] | None = None) -> Iterator[PlannedLayout]:
    """Yield each layout that the rules allow; `rejected` receives the violations of others."""
    choices: Iterable[Choice] = [{}]
    for name in FIELDS:
        choices = _add_field(query, choices, name, [] if rejected is None else rejected)
    for choice in choices:
        yield PlannedLayout(**choice, global_batch=query.run.train.global_batch_size)


def _add_field(query: Query, choices: Iterable[Choice], name: str, rejected: list[str]) -> Iterator[Choice]:
    """Yield choices with one more field that keep the rules for which it is the last input."""
    launch, key = Launch(query.gpus, None, is_planned=True), BATCH_NAMES.get(name, name)
    for choice in choices:
        values = LayoutValues({**query.values, **choice})
        for value in [query.fixed[name]] if name in query.fixed else options(name, query, choice):
            values[key] = value
            if violation := first_violation(CHECKED[name], values, launch):
                rejected.append(violation.why)
            else:
                yield {**choice, name: value}


def first_violation(rules: Iterable[LayoutRule], values: LayoutValues, launch: Launch) -> Violation | None:
    """Return the violation of the first broken rule; None without any."""
    return next((violation for rule in rules if (violation := rule.violation(values, launch))), None)


CHECKED: dict[str, list[LayoutRule]] = {name: [] for name in FIELDS}
"""Rules by the last field among their inputs; rules without such an input are checked first."""
for checked_rule in TRAIN_RULES:
    inputs = [name for name in FIELDS if BATCH_NAMES.get(name, name) in checked_rule.inputs]
    CHECKED[inputs[-1] if inputs else FIELDS[0]].append(checked_rule)
