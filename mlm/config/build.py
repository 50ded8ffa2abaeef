"""Composed YAML → frozen dataclass, and back to plain values that JSON can hold.

Every fault of a run spec is found before anything starts and reported together (`ConfigError`): keys nobody
knows, values of the wrong type, and what the `check` of the command says about the rest.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from mlm.config.fields import Options, expanded, path_fault
from mlm.config.neighbours import FLAGS
from mlm.config.suggest import nearest
from mlm.config.tree import HOISTED, MISSING_VALUE, Leaf, flatten, leaves, sections
from mlm.errors import ConfigError
from mlm.files.atomic import digest_bytes

T = TypeVar("T")
Check = Callable[[T], list[str]]  # a built run spec → its faults


def build(cls: type[T], composed: dict[str, Any], check: Check[T] | None = None) -> T:
    """The run spec that composed YAML means, the layout (tp, pp, zero, …) moved into `parallel`.

    `check` adds faults between values. It also runs when some values are unusable, on the others: its
    faults that name an unusable key are left out. Raises ConfigError with all faults.
    """
    spec: type = cls
    flat = _with_homes(spec, flatten(composed) | _empty_values(spec, composed))
    faults, unusable = _faults_of_values(spec, flat)
    usable = {key: value for key, value in flat.items() if key in leaves(spec) and key not in unusable}
    try:
        config: T = _adapter(spec).validate_python(_nest(spec, usable))
    except ValidationError:  # a required value is unusable: nothing to run the check on
        assert faults
        raise ConfigError(faults) from None
    if check is not None:
        faults += [fault for fault in check(config) if not concerns(fault, unusable)]
    if faults:
        raise ConfigError(faults)
    return config


def _empty_values(cls: type, composed: dict[str, Any]) -> dict[str, Any]:
    """Keys to which `{}` was given, which would else be left to their defaults."""
    found = {}
    for key in leaves(cls):
        value: Any = composed
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, dict) and not value:
            found[key] = value
    return found


def to_dict(config: Any) -> dict[str, Any]:
    """A run spec as nested dicts, lists, strings, numbers, booleans and None. Inverse of `from_dict`."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), allow_nan=False))
    return plain


def from_dict(cls: type[T], saved: dict[str, Any]) -> T:
    """The run spec that `to_dict` wrote. Raises ConfigError if it is of another kind or version."""
    try:
        return _adapter(cls).validate_python(saved)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()]
        raise ConfigError([f"saved {cls.__name__}: {line}" for line in lines]) from None


def config_digest(config: Any) -> str:
    """Content digest of a run spec, as `xxh3:<hex>`: equal for equal values, whatever their order."""
    return digest_bytes(json.dumps(to_dict(config), sort_keys=True).encode())


def unknown_key(cls: type, key: str) -> str:
    """The fault of a key that no run spec of this kind has, with the closest known one."""
    if key in sections(cls):
        return f"'{key}' is a section: set its keys, such as {key}.{next(iter(leaves(sections(cls)[key])))}=…"
    if key.split(".")[0] in leaves(cls):
        return f"unknown key '{key}': {key.split('.')[0]} has no keys below it"
    if remedy := FLAGS.get(key):
        return f"unknown key '{key}'; {remedy}"
    found = nearest_key(cls, key)
    return f"unknown key '{key}'" + (f"; did you mean '{found}'?" if found else "")


def nearest_key(cls: type, key: str) -> str | None:
    """The known key closest to an unknown one; `tp` for `parallel.tp`."""
    top = key.removeprefix(f"{HOISTED}.")
    return top if top in leaves(cls) else nearest(key, leaves(cls))


def concerns(fault: str, names: Iterable[str]) -> bool:
    """Whether a fault mentions one of these keys, or a key of one of these sections.

    Whole words count: `tp` is in `tp=3`, not in `http`; `model` is in `model.num_heads=7`.
    """
    words = "".join(c if c.isalnum() or c in "._" else " " for c in fault).split()
    mentioned = {word.strip(".") for word in words}
    return any(word == name or word.startswith(f"{name}.") for name in names for word in mentioned)


def _with_homes(cls: type, flat: dict[str, Any]) -> dict[str, Any]:
    """Flat keys with `~` expanded in those that are paths."""
    roles = {key: leaf.role for key, leaf in leaves(cls).items()}
    return {key: expanded(value, role) if (role := roles.get(key)) else value for key, value in flat.items()}


def _faults_of_values(cls: type, flat: dict[str, Any]) -> tuple[list[str], set[str]]:
    """Faults that one key or value shows by itself, and the known keys whose value cannot be used."""
    known = leaves(cls)
    faults = [unknown_key(cls, key) for key in flat if key not in known]
    unusable = set()
    for key, leaf in known.items():
        value = flat.get(key, leaf.default)
        fault = missing(leaf) if value == MISSING_VALUE else _fault_of_value(leaf, value)
        if fault:
            faults.append(fault)
            unusable.add(key)
    return faults, unusable


def missing(leaf: Leaf) -> str:
    """The fault of a required value that was not given."""
    return f"{leaf.key} is required: add {leaf.key}=… ({leaf.doc.rstrip('.')})"


def _fault_of_value(leaf: Leaf, value: Any) -> str | None:
    numbers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, float)]
    if not all(map(math.isfinite, numbers)):
        return f"{leaf.key}={show(value)} must be finite"
    # pydantic would read true as 1 and 1e3 as a whole number: the second is meant, the first is a slip
    number_wanted = any(kind in (int, float) for kind in _alternatives(leaf.type))
    if not (isinstance(value, bool) and number_wanted):
        try:
            _adapter(leaf.type).validate_python(value)
            return None if leaf.role is None else path_fault(leaf.key, value, leaf.role)
        except ValidationError:
            pass
    return f"{leaf.key}={show(value)} must be {describe_type(leaf.type)}{_did_you_mean_choice(leaf, value)}"


def _did_you_mean_choice(leaf: Leaf, value: Any) -> str:
    found = nearest(str(value), [str(choice) for choice in _choices(leaf.type)])
    return f"; did you mean {leaf.key}={found}?" if found else ""


def show(value: Any) -> str:
    """A value as it is typed: true, null, [1,2]."""
    return value if isinstance(value, str) else json.dumps(value, default=str, separators=(",", ":"))


def describe_type(kind: Any) -> str:
    """A type annotation in words: `a whole number or null`."""
    words = []
    for alternative in _alternatives(kind):
        if get_origin(alternative) is Literal:
            words += [str(choice) for choice in get_args(alternative)]
        elif get_origin(alternative) in (tuple, list):
            inner = [a for a in get_args(alternative) if a is not Ellipsis]
            counted = (
                f"{len(inner)} "
                if get_origin(alternative) is tuple and ... not in get_args(alternative)
                else ""
            )
            words.append(f"a list of {counted}{_PLURALS.get(inner[0], 'values')}")
        else:
            words.append(_WORDS.get(alternative, str(alternative)))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_WORDS[Options] = "names with numbers, texts, true or false"
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def _alternatives(kind: Any) -> list[Any]:
    args = get_args(kind)
    return list(args) if args and type(None) in args else [kind]


def _choices(kind: Any) -> list[Any]:
    return [choice for a in _alternatives(kind) if get_origin(a) is Literal for choice in get_args(a)]


def _nest(cls: type, flat: dict[str, Any]) -> dict[str, Any]:
    """Flat keys as the nested values of the dataclass, hoisted keys put back into their section."""
    tree: dict[str, Any] = {name: {} for name in sections(cls)}
    hoisted = leaves(sections(cls)[HOISTED]) if HOISTED in sections(cls) else {}
    for key, value in flat.items():
        place = tree
        *path, name = [HOISTED, key] if key in hoisted else key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return tree


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return _cached_adapter(kind)


@cache
def _cached_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
