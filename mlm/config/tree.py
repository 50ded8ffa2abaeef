"""Run specs as trees of keys: `model.hidden_size`, its type, default and docstring.

`parallel` has no section in YAML: its fields (tp, pp, zero, …) are top-level keys (HOISTED).
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, reduce
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mlm.config.fields import (
    Aliases,
    Bound,
    Columns,
    ImportPath,
    ObserverEntry,
    OnlyIf,
    Options,
    Role,
    metadata,
)
from mlm.util.errors import Problem

HOISTED = "parallel"  # the section whose fields are top-level keys
OPTIONS = ("options", "columns")  # fields whose names user code or files define
MISSING_VALUE = "???"  # OmegaConf's mark of a required value


@dataclass(frozen=True)
class Leaf:
    """One key of a run spec."""

    key: str
    """As typed: `model.hidden_size`, `tp`."""
    type: Any
    """Its annotation, e.g. `int | None`."""
    default: Any
    """Default value; MISSING_VALUE if it is required."""
    doc: str
    """The string beneath the field."""
    role: Role | None = None
    """Purpose of its path; None if it is not a path."""
    bound: Bound | None = None
    """Bound of its number; None if it is not a number, or has no bound."""
    aliases: tuple[str, ...] = ()
    """Names in other programs."""
    shipped: tuple[str, ...] | None = None
    """Shipped values of a key that also takes an import path; None for other keys."""
    only_if: OnlyIf | None = None
    """Condition under which it is read, with its full key; None for always."""
    is_hoisted: bool = False
    """True for a field of `parallel`."""

    @property
    def section(self) -> str:
        """`model` for model.hidden_size, empty for a top-level key."""
        return self.key.rpartition(".")[0]


@cache
def leaves(cls: type) -> dict[str, Leaf]:
    return {leaf.key: leaf for leaf in _walk(cls, "")}


@cache
def other_names(cls: type) -> dict[str, tuple[str, ...]]:
    """Keys of a run spec by their names in other programs, the likeliest first."""
    keys: dict[str, tuple[str, ...]] = {}
    for key, leaf in leaves(cls).items():
        for name in leaf.aliases:
            keys[name] = (*keys.get(name, ()), key)
    return keys


def values_of(config: Any) -> dict[str, Any]:
    """The value of every key of a run spec: `model.num_layers` → 2, `tp` → 1."""
    spec: type = type(config)
    return {
        key: reduce(getattr, [HOISTED, key] if leaf.is_hoisted else key.split("."), config)
        for key, leaf in leaves(spec).items()
    }


def out_of_range(config: Any) -> dict[str, Problem]:
    spec: type = type(config)
    values = values_of(config)
    problems = dict[str, Problem]()
    for key, leaf in leaves(spec).items():
        if leaf.bound and (problem := leaf.bound.problem(key, values[key])):
            problems[key] = problem
    return problems


@cache
def sections(cls: type) -> dict[str, type]:
    """The sections of a run spec (`model`, `data`, …) and their dataclasses; `parallel` among them."""
    hints = get_type_hints(cls).items()
    return {name: kind for name, kind in hints if isinstance(kind, type) and is_dataclass(kind)}


def defaults(cls: type) -> dict[str, Any]:
    """The run spec's defaults: nested, hoisted, MISSING_VALUE where required."""
    values = {key: leaf.default for key, leaf in leaves(cls).items()}
    return nested({key: list(v) if isinstance(v, tuple) else v for key, v in values.items()})


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"model.num_layers": 2} as {"model": {"num_layers": 2}}. Inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        section = tree
        *path, name = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def flatten(tree: dict[str, Any], prefix: str = "", *, opaque: tuple[str, ...] = OPTIONS) -> dict[str, Any]:
    """{"model": {"num_layers": 2}} as {"model.num_layers": 2}; {} and names in `opaque` stay nested."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value and name not in opaque:
            flat |= flatten(value, f"{prefix}{name}.", opaque=opaque)
        else:
            flat[f"{prefix}{name}"] = value
    return flat


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The string beneath each field of a dataclass, inherited ones included, whitespace folded."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for base in filter(is_dataclass, cls.__bases__):
        docs |= field_docs(base)
    for statement, following in zip(body.body, body.body[1:], strict=False):
        match (statement, following):
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def describe_values(leaf: Leaf) -> str:
    """The values of a key in words: `a whole number or null`, or shipped names and an import path."""
    if leaf.shipped:
        return f"{', '.join(leaf.shipped)} or an import path"
    words, members = list[str](), alternatives(leaf.type)
    for alternative in members:
        origin, args = get_origin(alternative), get_args(alternative)
        if origin is Literal:
            words += map(str, args)
        elif origin in (tuple, list):
            inner = [arg for arg in args if arg is not Ellipsis]
            counted = f"{len(inner)} " if origin is tuple and Ellipsis not in args else ""
            words.append(f"a list of {counted}{_PLURALS.get(inner[0], 'values')}")
        elif alternative is bool and len(members) > 1:
            words += ["true", "false"]
        else:
            words.append(_WORDS.get(alternative, str(alternative)))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_WORDS[Options] = "names with numbers, texts, true or false"
_ENTRIES = "import paths, or of {use: package.module:NAME, …} with fields"
_WORDS[Columns] = "names with those of the file, such as {prompt: instruction}"
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts", ObserverEntry: _ENTRIES}


def alternatives(kind: Any) -> list[Any]:
    """The members of a union; [kind] for any other type."""
    return list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]


def choices(kind: Any) -> list[Any]:
    return [choice for a in alternatives(kind) if get_origin(a) is Literal for choice in get_args(a)]


def _walk(cls: type, prefix: str, section_only_if: OnlyIf | None = None) -> Iterator[Leaf]:
    types, docs = get_type_hints(cls), field_docs(cls)
    annotations = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        kind, annotation = types[item.name], annotations[item.name]
        condition = metadata(annotation, OnlyIf)
        only_if = condition.within(prefix) if condition else section_only_if
        if is_dataclass(kind):
            assert isinstance(kind, type)
            if item.name == HOISTED:
                yield from (replace(leaf, is_hoisted=True) for leaf in _walk(kind, prefix))
            else:
                yield from _walk(kind, f"{prefix}{item.name}.", only_if)
        else:
            names, imports = metadata(annotation, Aliases), metadata(annotation, ImportPath)
            default = MISSING_VALUE if item.default is MISSING else item.default
            if item.default_factory is not MISSING:
                default = item.default_factory()
            yield Leaf(
                key=f"{prefix}{item.name}",
                type=kind,
                default=default,
                doc=docs.get(item.name, ""),
                role=metadata(annotation, Role),
                bound=metadata(annotation, Bound),
                aliases=names.names if names else (),
                shipped=imports.shipped if imports else None,
                only_if=only_if,
            )
