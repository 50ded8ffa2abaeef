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
    """One problem per rule that a layout breaks. Rules that read a key `out_of_range` are skipped.

    `names` maps keys to the names they were typed under, `fix_names` to those under which a fix sets them.
    """
    sound = [rule for rule in rules if not set(rule.inputs) & set(out_of_range)]
    layout, read = LayoutValues(values, names), {key for rule in sound for key in rule.inputs}
    broken = {rule: violation for rule in sound if (violation := rule.violation(layout, launch))}
    problems = []
    for rule, violation in broken.items():
        changes = list[Change]()
        for key in rule.adjustable:
            # a key is to fix all rules that name it, unless starting elsewhere does, and to break none
            kept = [
                other
                for other in sound
                if other is rule or other not in broken or (key in other.adjustable and not other.local_only)
            ]
            # the nearest values below and above, and null
            tried = [(value, layout.changed({key: value})) for value in _range(key, layout, launch, read)]
            valid = [v for v, changed in tried if not any(other.violation(changed, launch) for other in kept)]
            numbers = [value for value in valid if type(value) is int]
            nearest = around(layout[key], numbers) if numbers else []
            changes += [{key: v} for v in (*nearest, *(v for v in valid if v not in numbers))]
        named = ({(fix_names or {}).get(key, key): value for key, value in c.items()} for c in changes[:2])
        settings = " or ".join(map(format_settings, named))
        fix = violation.fix(f"use {settings}" if settings else f"change {', '.join(rule.adjustable)}")
        problems.append(Problem(map(layout.name, rule.inputs), violation.why, fix))
    return problems


def _range(key: str, values: LayoutValues, launch: Launch, read: Collection[str]) -> Iterable[Any]:
    """Values worth trying for one key, the others as they are in `values`; `read` are keys of the rules."""
    started = launch.world_size
    ranks = divisors(started) if started else range(1, launch.most_ranks + 1)
    match key:
        case "model.num_heads":
            return divisors(values["model.hidden_size"])
        case "tp":
            return divisors(values[HEADS]) if HEADS in read else ranks
        case "cp" | "ep":
            return divisors(values[key])
        case "expert_tp":
            return (None,)
        case "pp":
            return range(1, min(values[LAYERS], launch.most_ranks) + 1) if LAYERS in read else ranks
        case "vp":  # interleaving needs pp * vp to divide the layers
            return divisors(values[LAYERS] // values["pp"]) or (1,) if LAYERS in read else (1,)
        case "dp" if values["dp"] is None:
            return ()
        case "dp":  # null (the ranks that are left) only where a launcher sets their number
            most, rest = divmod(launch.most_ranks, replica_size(values))
            if started is None:
                return range(1, most + 1)
            return () if rest else (most, None)
        case "data.seq_length":
            step = sequence_quantum(values)
            return around(values[key], range(step, values["model.max_positions"] + 1, step))
        case "tp_overlap":
            return divisors(overlapped_tokens(values)) or (1,)
        case "train.global_batch_size":
            return multiples_around(values[key], batch_quantum(values, launch))
        case _:
            return (FALLBACKS[key],)
