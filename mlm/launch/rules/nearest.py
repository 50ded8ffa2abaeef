"""The nearest valid layout: problems of a layout, each with the settings that fix it.

The fixes of one report fit together: any alternative of each problem gives a valid layout. Where changing one
key per problem cannot give that, all problems name their parts of one layout, to which the rules' own changes
lead when they are applied in turn.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
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
ONE_RANK = {"tp": 1, "cp": 1, "pp": 1, "vp": 1, "ep": 1}  # leaves only numbers that other keys fix


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
    settings = LayoutValues(values, names)
    broken = [rule for rule in sound if rule.violation(settings, launch)]
    elsewhere = [rule for rule in broken if rule.local_only]
    rest = [rule for rule in broken if not rule.local_only]
    kept = [rule for rule in sound if rule not in elsewhere]
    fix_names = fix_names or {}
    return [
        *LayoutFixes(settings, launch, kept, fix_names).problems(rest),
        *LayoutFixes(settings, launch, sound, fix_names).problems(elsewhere),
    ]


@dataclass
class LayoutFixes:
    """The settings of a layout, the rules that it should keep, and the nearest settings that do."""

    values: LayoutValues
    launch: Launch
    rules: list[LayoutRule]
    fix_names: Mapping[str, str]

    def __post_init__(self) -> None:
        self.read = {key for rule in self.rules for key in rule.inputs}

    def problems(self, broken: list[LayoutRule]) -> list[Problem]:
        """The problem of each of these rules, which do not hold."""
        fixes, alone = self._fixes(broken) if broken else ([], False)
        problems = []
        for rule, changes in zip(broken, fixes, strict=True):
            violation = rule.violation(self.values, self.launch)
            assert violation is not None
            named = ({self.fix_names.get(key, key): value for key, value in c.items()} for c in changes)
            fix = violation.fix(" or ".join(map(format_settings, named)), alone=alone)
            problems.append(Problem(map(self.values.name, rule.inputs), violation.why, fix))
        return problems

    def _fixes(self, broken: list[LayoutRule]) -> tuple[list[list[Change]], bool]:
        """For each broken rule, the alternatives that fix it; True if any of one go with any of another."""
        fixes = []
        for rule in broken:
            # a key is to fix all rules that name it, and to break none
            others = [other for other in self.rules if other not in broken]
            fixes.append(
                [
                    change
                    for key in rule.adjustable
                    for change in self._changes(
                        key, self.values, [*others, *(other for other in broken if key in other.adjustable)]
                    )
                ][:2]
            )
        together = (_merged(changes) for changes in product(*fixes))
        if all(fixes) and not any(self._broken(self.values.changed(change)) for change in together):
            return fixes, True
        layout = self._repaired({}) or self._repaired(ONE_RANK)
        assert layout, "one rank with a batch, a sequence and heads that fit is always valid"
        shares = [{key: layout[key] for key in rule.inputs if key in layout} for rule in broken]
        shares[0] |= {key: value for key, value in layout.items() if key not in _merged(shares)}
        return [[share] for share in shares], len(broken) == 1

    def _repaired(self, start: Change) -> Change | None:
        """Apply the nearest change of each broken rule in turn; None if this leads to no valid layout."""
        movable = dict.fromkeys(key for rule in self.rules for key in rule.adjustable if key in self.values)
        layout = self.values.changed({key: value for key, value in start.items() if key in movable})
        for _ in range(24):  # each change is for one rule
            broken = self._broken(layout)
            if not broken:
                return {key: layout[key] for key in movable if layout[key] != self.values[key]}
            keys = [key for key in broken[0].adjustable if key in movable]
            changes = [change for key in keys for change in self._changes(key, layout, broken[:1])]
            if not changes:  # the rule's likeliest key makes room for the next one
                key = next((key for key in keys if key in {*ONE_RANK, "dp"} and (layout[key] or 1) > 1), None)
                if key is None:
                    return None
                changes = [{key: 1}]
            layout = min(map(layout.changed, changes), key=lambda changed: self._cost(layout, changed))
        return None

    def _cost(self, layout: LayoutValues, changed: LayoutValues) -> tuple[int, float]:
        """Rules that a changed layout breaks, then how many times larger or smaller its numbers become."""
        pairs = [(layout[key], value) for key, value in changed.items() if value != layout[key]]
        ratios = [after / before for before, after in pairs if type(before) is type(after) is int]
        distance = sum(abs(math.log2(ratio)) for ratio in ratios if ratio > 0)
        return len(self._broken(changed)), math.inf if any(value is None for _, value in pairs) else distance

    def _changes(self, key: str, layout: LayoutValues, rules: Iterable[LayoutRule]) -> list[Change]:
        """The changes of a key to the nearest values below and above, and to null, that keep `rules`."""
        changed = ((value, layout.changed({key: value})) for value in self._range(key, layout))
        valid = [v for v, values in changed if not any(rule.violation(values, self.launch) for rule in rules)]
        numbers = [v for v in valid if isinstance(v, int) and not isinstance(v, bool)]
        nearest = around(layout[key], numbers) if numbers else []
        return [{key: value} for value in (*nearest, *(v for v in valid if v not in numbers))]

    def _broken(self, values: LayoutValues) -> list[LayoutRule]:
        return [rule for rule in self.rules if rule.violation(values, self.launch)]

    def _range(self, key: str, values: LayoutValues) -> Iterable[Any]:
        """Values worth trying for one key, the others as they are in `values`."""
        match key:
            case "model.num_heads":
                return divisors(values["model.hidden_size"])
            case "tp":
                return divisors(values[HEADS]) if HEADS in self.read else self._ranks()
            case "cp" | "ep":
                return divisors(values[key])
            case "expert_tp":
                return (None,)
            case "pp":
                most = min(values[LAYERS], self.launch.most_ranks) if LAYERS in self.read else 0
                return range(1, most + 1) if most else self._ranks()
            case "vp":  # interleaving needs pp * vp to divide the layers
                return divisors(values[LAYERS] // values["pp"]) or (1,) if LAYERS in self.read else (1,)
            case "dp" if values["dp"] is None:
                return ()
            case "dp":  # null (the ranks that are left) only where a launcher sets their number
                most, rest = divmod(self.launch.most_ranks, replica_size(values))
                if self.launch.world_size is None:
                    return range(1, most + 1)
                return () if rest else (most, None)
            case "data.seq_length":
                step = sequence_quantum(values)
                return around(values[key], range(step, values["model.max_positions"] + 1, step))
            case "tp_overlap":
                return divisors(overlapped_tokens(values)) or (1,)
            case "train.global_batch_size":
                return multiples_around(values[key], batch_quantum(values, self.launch))
            case _:
                return (FALLBACKS[key],)

    def _ranks(self) -> Iterable[int]:
        """Sizes of an axis when no model bounds them."""
        started = self.launch.world_size
        return divisors(started) if started else range(1, self.launch.most_ranks + 1)


def _merged(changes: Iterable[Change]) -> Change:
    return {key: value for change in changes for key, value in change.items()}
