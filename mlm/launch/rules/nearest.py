"""Problems of a layout, each with the nearest value of a key that fixes it and breaks no other rule."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mlm.config.suggest import around, divisors, multiples_around
from mlm.launch.rules.layout import (
    Launch,
    LayoutRule,
    LayoutValues,
    batch_quantum,
    overlapped_tokens,
    replica_size,
    sequence_quantum,
)
from mlm.util.errors import Problem, format_settings

Change = dict[str, Any]
"""Keys to set, with their new values."""

HEADS, LAYERS = "model.num_heads", "model.num_layers"
FALLBACKS = {"pipeline": "1f1b", "zero": 2, "sequence_parallel": False}  # valid with every layout


def layout_problems(
    values: Mapping[str, Any],
    launch: Launch,
    rules: Iterable[LayoutRule],
    out_of_range: Collection[str] = (),
    *,
    names: Mapping[str, str] | None = None,
    fix_names: Mapping[str, str] | None = None,
) -> list[Problem]:
    """One problem per broken rule. Rules that read a key `out_of_range` are skipped.

    `names` maps keys to their typed names, `fix_names` to the names that a fix sets.
    """
    active = [rule for rule in rules if not set(rule.inputs) & set(out_of_range)]
    layout, keys = LayoutValues(values, names), {key for rule in active for key in rule.inputs}
    broken = {rule: violation for rule in active if (violation := rule.violation(layout, launch))}
    problems = []
    for rule, violation in broken.items():
        changes = list[Change]()
        for key in rule.adjustable:
            # A fix must satisfy all rules that can adjust this key, except local ones, and break none.
            required = [
                other
                for other in active
                if other is rule or other not in broken or (key in other.adjustable and not other.local_only)
            ]
            # Propose the nearest values below and above, and null.
            trials = [(value, layout.changed({key: value})) for value in _range(key, layout, launch, keys)]
            valid = [v for v, changed in trials if not any(r.violation(changed, launch) for r in required)]
            numbers = [value for value in valid if type(value) is int]
            nearest = around(layout[key], numbers) if numbers else []
            changes += [{key: v} for v in (*nearest, *(v for v in valid if v not in numbers))]
        fixes = ({(fix_names or {}).get(key, key): value for key, value in c.items()} for c in changes[:2])
        settings = " or ".join(map(format_settings, fixes))
        fix = violation.fix(f"use {settings}" if settings else f"change {', '.join(rule.adjustable)}")
        problems.append(Problem(map(layout.name, rule.inputs), violation.why, fix))
    return problems


def _range(key: str, values: LayoutValues, launch: Launch, keys: Collection[str]) -> Iterable[Any]:
    """Values worth trying for one key, all others as in `values`; `keys` are the inputs of the rules."""
    started = launch.world_size
    ranks = divisors(started) if started else range(1, launch.most_ranks + 1)
    match key:
        case "model.num_heads":
            return divisors(values["model.hidden_size"])
        case "tp":
            return divisors(values[HEADS]) if HEADS in keys else ranks
        case "cp" | "ep":
            return divisors(values[key])
        case "expert_tp":
            return (None,)
        case "pp":
            return range(1, min(values[LAYERS], launch.most_ranks) + 1) if LAYERS in keys else ranks
        case "vp":  # interleaving needs pp * vp to divide the layers
            return divisors(values[LAYERS] // values["pp"]) or (1,) if LAYERS in keys else (1,)
        case "dp" if values["dp"] is None:
            return ()
        case "dp":  # null (the ranks that are left) only where a launcher sets their number
            limit, remainder = divmod(launch.most_ranks, replica_size(values))
            if started is None:
                return range(1, limit + 1)
            return () if remainder else (limit, None)
        case "data.seq_length":
            step = sequence_quantum(values)
            return around(values[key], range(step, values["model.max_positions"] + 1, step))
        case "tp_overlap":
            return divisors(overlapped_tokens(values)) or (1,)
        case "train.global_batch_size":
            return multiples_around(values[key], batch_quantum(values, launch))
        case _:
            return (FALLBACKS[key],)
