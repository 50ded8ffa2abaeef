"""Composed YAML → frozen dataclass, and back to plain values that JSON can hold.

All problems of a run spec are reported together before anything starts (`ConfigError`): unknown keys, values
of the wrong type or out of range, and conflicts that the command's `check` finds. `path_problems` finds paths
that no command may write.
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
    """Build a run spec from composed YAML; the layout (tp, pp, zero, …) moves into `parallel`.

    With a `check`, bounds and its problems are added. Unusable values take their defaults for it, and its
    problems of their keys are dropped. Raises ConfigError with all problems.
    """
    spec: type = cls
    schema, flat = leaves(spec), flatten(composed)
    for key in flat.keys() & schema.keys():
        if role := schema[key].role:
            flat[key] = expanded(flat[key], role)
    problems = [unknown_key(spec, key) for key in flat if key not in schema]
    unusable = set[str]()
    for key, leaf in schema.items():
        value = flat.get(key, leaf.default)
        if value == MISSING_VALUE:
            fix = f"add {leaf.key}=… ({leaf.doc.rstrip('.')})"
            problem: Problem | None = Absent((leaf.key,), f"{leaf.key} is required: {fix}")
        else:
            problem = problem_of_value(leaf, value)
        if problem:
            problems.append(problem)
            unusable.add(key)
    # Move hoisted keys into their section.
    homes = {key: f"{HOISTED}.{key}" if leaf.is_hoisted else key for key, leaf in schema.items()}
    usable = {homes[key]: value for key, value in flat.items() if key in schema and key not in unusable}
    sections_of: dict[str, Any] = {name: {} for name in sections(spec)}
    try:
        config: T = _adapter(spec).validate_python(sections_of | nested(usable))
    except ValidationError:  # a required value is unusable: there is no config to check
        assert problems
        raise ConfigError(problems) from None
    if check is not None:
        outside = out_of_range(config)
        problems += outside.values()
        conflicts = map(Problem.of, check(config))
        problems += [problem for problem in conflicts if not problem.concerns({*unusable, *outside})]
    if problems:
        raise ConfigError(problems)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """A run spec as nested dicts, lists, strings, numbers, booleans and None. Inverse of `from_dict`."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), allow_nan=False))
    return plain


def from_dict(cls: type[T], saved: dict[str, Any]) -> T:
    """The run spec that `to_dict` wrote. Raises ConfigError for another type or version."""
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
    """The problem of a value: wrong type, not finite, or an unusable path."""
    if not _is_finite(value):
        return Problem((leaf.key,), f"{leaf.key}={format_value(value)} must be finite")
    # pydantic reads 1e3 as an integer, as intended, and also true as 1, which is a mistake.
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
        problem = f"{leaf.key}={format_value(value)} must be {describe_values(leaf)}"
        return Problem((leaf.key,), problem, f"use '{leaf.key}=[{value}]'")
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
    """Problems of results that would replace a user's file, and of folders that no command may claim.

    Each command checks the names inside its folder.
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
    """Context of a command's work that reserves standard output for a result named `-`."""
    results = (Role.RESULT, Role.PLACE)
    if is_dataclass(config) and any(p == STDOUT and role in results for _, p, role in paths_of(config)):
        return results_alone_on_stdout()
    return nullcontext()
