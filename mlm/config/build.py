"""Composed YAML → frozen dataclass, and back to plain values that JSON can hold.

Every problem of a run spec is found before anything starts and reported together (`ConfigError`): unknown
keys, values of the wrong type or out of range, and what the `check` of the command finds between values. At
the end: paths that no command may write.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from mlm.config.fields import READ, ObserverEntry, Role, expanded, path_problem, split_weight
from mlm.config.suggest import nearest, unknown_key
from mlm.config.tree import (
    HOISTED,
    MISSING_VALUE,
    Leaf,
    alternatives,
    choices,
    describe_values,
    flatten,
    leaves,
    nested,
    out_of_range,
    sections,
    values_of,
)
from mlm.util.errors import Absent, ConfigError, Problem, format_value
from mlm.util.files import digest_bytes
from mlm.util.ownership import STDOUT, file_type_name, kind_of_folder, rejected_place
from mlm.util.results import result_problems, results_alone_on_stdout

T = TypeVar("T")
Check = Callable[[T], Iterable[str]]  # a built run spec → its problems


def build(cls: type[T], composed: dict[str, Any], check: Check[T] | None = None) -> T:
    """The run spec that composed YAML means, the layout (tp, pp, zero, …) moved into `parallel`.

    With a `check`, bounds of numbers are checked and its problems between values added. It also runs when
    some values are unusable, with their defaults: its problems of an unusable key are left out. Raises
    ConfigError with all problems.
    """
    spec: type = cls
    known, flat = leaves(spec), flatten(composed)
    for key in flat.keys() & known.keys():
        if role := known[key].role:
            flat[key] = expanded(flat[key], role)
    problems = [unknown_key(spec, key) for key in flat if key not in known]
    unusable = set[str]()
    for key, leaf in known.items():
        value = flat.get(key, leaf.default)
        if value == MISSING_VALUE:
            fix = f"add {leaf.key}=… ({leaf.doc.rstrip('.')})"
            problem: Problem | None = Absent((leaf.key,), f"{leaf.key} is required: {fix}")
        else:
            problem = problem_of_value(leaf, value)
        if problem:
            problems.append(problem)
            unusable.add(key)
    # hoisted keys go back into their section
    homes = {key: f"{HOISTED}.{key}" if leaf.is_hoisted else key for key, leaf in known.items()}
    usable = {homes[key]: value for key, value in flat.items() if key in known and key not in unusable}
    sections_of: dict[str, Any] = {name: {} for name in sections(spec)}
    try:
        config: T = _adapter(spec).validate_python(sections_of | nested(usable))
    except ValidationError:  # a required value is unusable: nothing to run the check on
        assert problems
        raise ConfigError(problems) from None
    if check is not None:
        outside = out_of_range(config)
        problems += outside.values()
        between = map(Problem.of, check(config))
        problems += [problem for problem in between if not problem.concerns({*unusable, *outside})]
    if problems:
        raise ConfigError(problems)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """A run spec as nested dicts, lists, strings, numbers, booleans and None. Inverse of `from_dict`."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), allow_nan=False))
    return plain


def from_dict(cls: type[T], saved: dict[str, Any]) -> T:
    """The run spec that `to_dict` wrote. Raises ConfigError if it is of another kind or version."""
    try:
        spec: type = cls
        config: T = _adapter(spec).validate_python(saved)
        return config
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()]
        raise ConfigError([f"saved {cls.__name__}: {line}" for line in lines]) from None


def config_digest(config: Any) -> str:
    """Content digest of a run spec, as `xxh3:<hex>`: equal for equal values, whatever their order."""
    return digest_bytes(json.dumps(to_dict(config), sort_keys=True).encode())


def problem_of_value(leaf: Leaf, value: Any) -> Problem | None:
    """The problem of a value that is not of the key's type, not finite, or no usable path."""
    if not _is_finite(value):
        return Problem((leaf.key,), f"{leaf.key}={format_value(value)} must be finite")
    # pydantic would read true as 1 and 1e3 as a whole number: the second is meant, the first is a slip
    number_wanted = any(kind in (int, float) for kind in alternatives(leaf.type))
    if not (isinstance(value, bool) and number_wanted):
        try:
            if not _is_finite(_adapter(leaf.type).validate_python(value)):  # of text: 1e400, Infinity
                return Problem((leaf.key,), f"{leaf.key}={format_value(value)} must be finite")
            return None if leaf.role is None else path_problem(leaf.key, value, leaf.role)
        except ValidationError:
            pass
    if leaf.role is Role.BLEND and isinstance(value, list):
        fix = f"weight and corpus are one entry: '{leaf.key}=[0.3 wiki,0.7 web]'"
        return Problem((leaf.key,), f"{leaf.key}={format_value(value)} must be {describe_values(leaf)}", fix)
    if value is None and leaf.role is not None:
        return Problem.at(leaf.key, value, "names no path", "name one, or ./null if it is called so")
    lists = [kind for kind in alternatives(leaf.type) if get_origin(kind) in (tuple, list)]
    if isinstance(value, str) and value and any(get_args(kind)[0] in (str, ObserverEntry) for kind in lists):
        wrong = f"{leaf.key}={format_value(value)} must be {describe_values(leaf)}"
        return Problem((leaf.key,), wrong, f"use '{leaf.key}=[{value}]'")
    near = nearest(str(value), [str(choice) for choice in choices(leaf.type)])
    hint = f"did you mean {leaf.key}={near}?" if near else ""
    return Problem((leaf.key,), f"{leaf.key}={format_value(value)} must be {describe_values(leaf)}", hint)


def _is_finite(value: Any) -> bool:
    """False for infinity or NaN, in a list or among fields too."""
    if isinstance(value, list | tuple | dict):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    if is_dataclass(kind):
        _reject_unknown_keys(kind)
    return TypeAdapter(kind)


def _reject_unknown_keys(spec: Any) -> None:
    """Let pydantic reject keys that a run spec and its sections do not have."""
    spec.__pydantic_config__ = {"extra": "forbid"}
    for section in sections(spec).values():
        _reject_unknown_keys(section)


def path_problems(config: Any) -> list[str]:
    """Results that would replace a user's file, and folders that no command may claim.

    Names in a folder that are in the way are known to the command, which checks them itself.
    """
    problems = list[str]()
    for key, value, role in paths_of(config):
        if role is Role.RESULT:
            problems += result_problems(value, key=key, inputs=inputs_of(config))
        if role not in (Role.FOLDER, Role.CACHE):
            continue
        folder = Path(value)
        try:
            if value == STDOUT:
                problem = "standard output cannot hold a folder"
                problems.append(Problem.at(key, value, problem, "name a folder"))
            elif os.path.lexists(folder) and not folder.is_dir():
                problem = f"{file_type_name(folder)} stands there"
                problems.append(Problem.at(key, value, problem, "name a new folder"))
            elif role is Role.FOLDER and kind_of_folder(folder) is None:  # a cache may be anywhere
                problems += rejected_place(f"{key}={value}", folder, protected_from(config))
        except OSError as error:
            problems.append(Problem.at(key, value, str(error.strerror), "name another folder"))
    return problems


def paths_of(config: Any) -> Iterator[tuple[str, str, Role]]:
    """(key, path, role) of every path that a run spec holds."""
    spec: type = type(config)
    values = values_of(config)
    for key, leaf in leaves(spec).items():
        if leaf.role is None:
            continue
        value = values[key]
        for item in value if isinstance(value, list | tuple) else (value,):
            if item is not None:
                yield key, split_weight(item)[1] if leaf.role is Role.BLEND else item, leaf.role


def inputs_of(config: Any) -> list[str]:
    return [path for _, path, role in paths_of(config) if role in READ]


def protected_from(config: Any) -> list[str]:
    """The inputs that no folder to write may be or hold.

    A tokenizer may: `mlm data tokenizer out=corpus`, then `mlm data build tokenizer=corpus out=corpus`.
    """
    return [path for key, path, role in paths_of(config) if role in READ and not key.endswith("tokenizer")]


def streams_for(config: Any) -> AbstractContextManager[None]:
    """Around the work of a command: leaves standard output to its results where one is named `-`."""
    results = (Role.RESULT, Role.PLACE)
    if is_dataclass(config) and any(p == STDOUT and role in results for _, p, role in paths_of(config)):
        return results_alone_on_stdout()
    return nullcontext()
