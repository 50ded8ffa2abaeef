"""Every valid layout of a number of devices, without torch.

A layout is valid if the rules of `mlm pretrain` (launch/rules/layout.py) hold; they are called, not
repeated.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
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

CONTEXT_SIZES = (1, 2, 4, 8)
"""Values of cp that are searched."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """The run and GPUs that layouts are searched for."""

    run: PretrainConfig
    """Its layout and micro-batch are what is searched."""
    hardware: HardwareConfig
    """Of one of `gpus` ranks: `HardwareConfig.for_ranks` is called here alone."""
    gpus: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of PlannedLayout that are not searched, with their values."""

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
    train = replace(config.train, micro_batch_size=micro or 1)
    return Query(
        run=replace(config, parallel=ParallelConfig(), train=train),  # type: ignore[arg-type]
        hardware=config.hardware,
        gpus=config.gpus,
        fixed={name: value for name, value in fixed.items() if value is not None},
    )


Choice = dict[str, Any]
"""Some fields of a layout."""
OPTIONS: dict[str, Callable[[Query, Choice], Iterable[Any]]] = {
    "tp": lambda query, _: divisors(query.gpus),
    "cp": lambda query, _: _context_sizes(query),
    "pp": lambda query, c: divisors(max(query.gpus // (c["tp"] * c["cp"]), 1)),
    "dp": lambda query, c: [max(query.gpus // (c["tp"] * c["cp"] * c["pp"]), 1)],
    "vp": lambda query, c: _chunks(query.run.model.num_layers, c["pp"]),
    "pipeline": lambda _, c: ["1f1b", "zb_h1", "gpipe"] if c["pp"] > 1 else ["1f1b"],
    "zero": lambda _, c: [0, 2, 3] if c["dp"] * c["cp"] > 1 else [0],
    "sequence_parallel": lambda _, c: [False, True] if c["tp"] > 1 else [False],
    "tp_overlap": lambda *_: [1],
    "expert_tp": lambda *_: [None],
    "ep": lambda query, c: _expert_sizes(query, c),
    "micro_batch": lambda query, c: divisors(_samples(query, c)),
    "recompute": lambda query, _: ["none", "selective", "full"] if _keeps_scores(query) else ["none", "full"],
    "zero_reduce": lambda query, c: (
        ["last", "every"] if c["zero"] and _samples(query, c) > c["micro_batch"] else ["last"]
    ),
}
"""Values to try for each field of a layout, by those before it; settings without effect have one."""


def layouts(query: Query, rejected: list[str] | None = None) -> Iterator[PlannedLayout]:
    """Every layout that the rules allow, each once; `rejected` gets what is wrong with others."""
    choices: Iterable[Choice] = [{}]
    for name in OPTIONS:
        choices = _chosen(query, choices, name, [] if rejected is None else rejected)
    for choice in choices:
        yield PlannedLayout(**choice, global_batch=query.run.train.global_batch_size)


def _chosen(query: Query, choices: Iterable[Choice], name: str, rejected: list[str]) -> Iterator[Choice]:
    """Choices with another field, where the rules hold of which it is the last that they read."""
    launch, key = Launch(query.gpus, None, is_planned=True), BATCH_NAMES.get(name, name)
    for choice in choices:
        values = LayoutValues({**query.values, **choice})
        for value in [query.fixed[name]] if name in query.fixed else OPTIONS[name](query, choice):
            values[key] = value
            if violation := first_violation(CHECKED[name], values, launch):
                rejected.append(violation.why)
            else:
                yield {**choice, name: value}


def first_violation(rules: Iterable[LayoutRule], values: LayoutValues, launch: Launch) -> Violation | None:
    """The violation of the first rule, in their order, that settings do not keep; None if they keep all."""
    return next((found for rule in rules if (found := rule.violation(values, launch))), None)


def _last_read(rule: LayoutRule) -> str:
    """The last field that a rule reads; the first of all if it reads none."""
    read = [name for name in OPTIONS if BATCH_NAMES.get(name, name) in rule.inputs]
    return read[-1] if read else next(iter(OPTIONS))


CHECKED = {name: [rule for rule in TRAIN_RULES if _last_read(rule) == name] for name in OPTIONS}
"""Rules by the field with which they are checked."""


def _context_sizes(query: Query) -> list[int]:
    """Ranks that split a sequence where none are typed.

    Where attention has no dropout: else no fused kernel serves the blocks of several ranks. Of mixtures none:
    each split of their experts is counted apart.
    """
    model = query.run.model
    is_whole = context_problem(2, model, query.run.data) is not None
    if is_whole or model.attention_dropout or architecture_of(model).experts:
        return [1]
    return [cp for cp in CONTEXT_SIZES if query.gpus % cp == 0]


def _chunks(layers: int, pp: int) -> list[int]:
    return divisors(layers // pp) if 1 < pp <= layers and layers % pp == 0 else [1]


def _expert_sizes(query: Query, choice: Choice) -> list[int]:
    experts = architecture_of(query.run.model).experts
    ranks = choice["dp"] * choice["cp"] * (choice["tp"] if choice["expert_tp"] == 1 else 1)
    return divisors(math.gcd(experts, ranks)) if experts else [1]


def _samples(query: Query, choice: Choice) -> int:
    """Samples of a replica in a step."""
    return query.run.train.global_batch_size // choice["dp"] or 1


def _keeps_scores(query: Query) -> bool:
    """True if attention is not fused: elsewhere scores are never kept."""
    return query.hardware.device == "cpu" and query.run.model.attention_dropout > 0
