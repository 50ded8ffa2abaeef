"""Keys that the user set and nothing reads: fields declare by `OnlyIf` what they apply to."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from mlm.config.fields import OnlyIf
from mlm.config.tree import Leaf, leaves, values_of
from mlm.models.family import family_of, option
from mlm.util.errors import Problem, format_value


def unread_problems(config: Any, typed: Set[str], written: Set[str]) -> Iterator[Problem]:
    """Problems of keys that nothing reads: those `typed`, and those `written` in YAML of the user's."""
    spec: type = type(config)
    known, values = dict(leaves(spec)), values_of(config)
    if "model.kind" in known:  # the options of its family too
        prefix, family = "model.options.", family_of(config.model.kind)
        values |= {f"{prefix}{name}": option(config.model, name) for name in family.options}
        for name, leaf in leaves(family.settings).items() if family.settings else ():
            known[prefix + name] = replace(leaf, only_if=leaf.only_if and leaf.only_if.within(prefix))
    for key in [key for key in known if key in typed or key in written]:
        condition = _broken_condition(key, known, values)
        if condition is None:
            continue
        other, is_here = condition.key, condition.key in values
        # YAML may be of several commands, or hold a whole configuration; and what is typed stands above it.
        is_whole = other in written and values[key] == known[key].default
        if key not in typed and (not is_here or other in typed or is_whole):
            continue
        why = f"with {other}={format_value(values[other])}" if is_here else f"without {other}"
        values_read = condition.values or ((True,) if values.get(other) is False else ())
        wanted = " or ".join(f"{other}={format_value(value)}" for value in values_read) or other
        fix = "remove it" + f", or set {wanted}" * is_here
        yield Problem((key, other), f"{key}={format_value(values[key])}: has no effect {why}", fix)


def _broken_condition(key: str, known: Mapping[str, Leaf], values: Mapping[str, Any]) -> OnlyIf | None:
    """The condition for which a key is not read; None if it is, or may be by the user's code or a model."""
    condition = known[key].only_if if key in known else None
    if condition is None:
        return None
    other = condition.key
    if other not in values:  # the model of a command without model.* is that of its checkpoint
        return None if other.startswith("model.") and "model.kind" not in values else condition
    shipped = known[other].shipped if other in known else None
    holds = condition.holds(values[other]) or (shipped is not None and values[other] not in shipped)
    return _broken_condition(other, known, values) or (None if holds else condition)
