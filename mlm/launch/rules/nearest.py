"""The nearest valid layout: problems of a layout, each with the settings that fix it.

The fixes of one report fit together: any alternative of each problem gives a valid layout. Where changing one
key per problem cannot give that, all problems name their parts of one layout, the nearest valid one.
"""

import math
from collections.abc import Collection, Iterable, Mapping
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

MOST_ALTERNATIVES = 2  # that a problem names
HEADS, LAYERS = "model.num_heads", "model.num_layers"
FALLBACKS = {"pipeline": "1f1b", "zero": 2, "sequence_parallel": False}  # valid with every layout
MOVABLE = (
    *(HEADS, "tp", "cp", "pp", "vp", "dp", "ep", "expert_tp", *FALLBACKS),
    *("data.seq_length", "tp_overlap", "train.global_batch_size"),
)


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
    sound = [rule for rule in rules if not set(rule.reads) & set(out_of_range)]
    settings = LayoutValues(values, names)
    broken = [rule for rule in sound if rule.breach(settings, launch)]
    elsewhere = [rule for rule in broken if rule.only_here]
    rest = [rule for rule in broken if not rule.only_here]
    kept = [rule for rule in sound if rule not in elsewhere]
    return [
        *LayoutFixes(settings, launch, kept, fix_names).problems(rest),
        *LayoutFixes(settings, launch, sound, fix_names).problems(elsewhere),
    ]


class LayoutFixes:
    """The settings of a layout, the rules that it should keep, and the nearest settings that do."""

    def __init__(
        self,
        values: LayoutValues,
        launch: Launch,
        rules: list[LayoutRule],
        fix_names: Mapping[str, str] | None = None,
    ) -> None:
        self.values, self.launch, self.rules, self.fix_names = values, launch, rules, fix_names or {}
        self.read = {key for rule in rules for key in rule.reads}

    def problems(self, broken: list[LayoutRule]) -> list[Problem]:
        """The problem of each of these rules, which do not hold."""
        fixes, alone = self._fixes(broken) if broken else ([], False)
        found = []
        for rule, changes in zip(broken, fixes, strict=True):
            breach = rule.breach(self.values, self.launch)
            assert breach is not None
            fix = breach.fix(" or ".join(map(self._spelled, changes)), alone=alone)
            found.append(Problem(map(self.values.name, rule.reads), breach.why, fix))
        return found

    def _spelled(self, change: Change) -> str:
        return format_settings({self.fix_names.get(key, key): value for key, value in change.items()})

    def _fixes(self, broken: list[LayoutRule]) -> tuple[list[list[Change]], bool]:
        """For each broken rule, the alternatives that fix it; True if any of one go with any of another."""
        found = [self._alternatives(rule, broken) for rule in broken]
        together = (_merged(changes) for changes in product(*found))
        if all(found) and all(self._keeps(self.rules, change) for change in together):
            return found, True
        nearest = self._nearest(self._movable(), {}, math.inf)
        assert nearest is not None  # tp=1 cp=1 pp=1 vp=1 is always valid
        shares = [{key: nearest[key] for key in rule.reads if key in nearest} for rule in broken]
        shares[0] |= {key: value for key, value in nearest.items() if key not in _merged(shares)}
        return [[share] for share in shares], len(broken) == 1

    def _alternatives(self, rule: LayoutRule, broken: list[LayoutRule]) -> list[Change]:
        """Changes of one key that fix a rule and all others that this key is to fix, and break none."""
        changes: list[Change] = []
        for key in rule.moves:
            kept = [other for other in self.rules if key in other.moves or other not in broken]
            valid = [value for value in self._range(key, self.values) if self._keeps(kept, {key: value})]
            changes += ({key: value} for value in _nearest(self.values[key], valid))
        return changes[:MOST_ALTERNATIVES]

    def _movable(self) -> list[str]:
        """Keys that a change may touch: not the model's, unless the problem is its own."""
        moved = {
            key for rule in self.rules for key in rule.moves if key != HEADS or not self._keeps([rule], {})
        }
        return [key for key in MOVABLE if key in moved and key in self.values]

    def _nearest(self, keys: list[str], change: Change, limit: float) -> Change | None:
        """The nearest sound layout that differs by `change` and by what `keys` become, if below `limit`."""
        ready = [rule for rule in self.rules if not set(rule.reads) & set(keys)]
        if self._distance(change) >= limit or not self._keeps(ready, change):
            return None
        if not keys:
            return change
        key, *rest = keys
        values = [v for v in self._range(key, self.values.changed(change)) if v != self.values[key]]
        nearest = None
        for further in sorted([change, *({**change, key: value} for value in values)], key=self._distance):
            if found := self._nearest(rest, further, limit):
                nearest, limit = found, self._distance(found)
        return nearest

    def _keeps(self, rules: Iterable[LayoutRule], change: Change) -> bool:
        changed = self.values.changed(change)
        return all(rule.breach(changed, self.launch) is None for rule in rules)

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
            case "dp":
                return self._replicas(values)
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

    def _replicas(self, values: LayoutValues) -> Iterable[int | None]:
        """Values for dp; null (the ranks that are left) only where a launcher sets their number."""
        each, rest = divmod(self.launch.most_ranks, replica_size(values))
        if values["dp"] is None:
            return ()
        if self.launch.world_size is None:
            return range(1, each + 1)
        return () if rest else (each, None)

    def _distance(self, change: Change) -> float:
        """Distance of a change: keys touched, and how many times larger or smaller each becomes."""
        return sum(1 + _factor(self.values[key], value) for key, value in change.items())


def _factor(old: Any, new: Any) -> float:
    if isinstance(old, str | bool):
        return 1.0
    return math.inf if new is None else abs(math.log2((new or 1) / (old or 1)))


def _nearest(value: Any, valid: list[Any]) -> list[Any]:
    """The nearest numbers below and above `value`, then what is no number."""
    numbers = [v for v in valid if isinstance(v, int) and not isinstance(v, bool)]
    return [*(around(value, numbers) if numbers else ()), *(v for v in valid if v not in numbers)]


def _merged(changes: Iterable[Change]) -> Change:
    return {key: value for change in changes for key, value in change.items()}
