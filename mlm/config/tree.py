"""The run specs seen as trees of keys: `model.hidden_size`, its type, default and docstring.

`parallel` has no section in YAML: its fields (tp, pp, zero, …) are top-level keys (HOISTED).
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from mlm.config.fields import Role, role_of

HOISTED = "parallel"  # the section whose fields are top-level keys
OPTIONS = "options"  # the field of settings whose names only the user's own code knows
MISSING_VALUE = "???"  # how OmegaConf writes a value that must be given


@dataclass(frozen=True)
class Leaf:
    """One key of a run spec."""

    key: str
    """As typed: `model.hidden_size`, `tp`."""
    type: Any
    """Its annotation, e.g. `int | None`."""
    default: Any
    """Default value, MISSING_VALUE when it must be given."""
    doc: str
    """The string beneath the field."""
    role: Role | None = None
    """Purpose of its path; None for what is no path."""

    @property
    def section(self) -> str:
        """`model` for model.hidden_size, empty for a top-level key."""
        return self.key.rpartition(".")[0]


@cache
def leaves(cls: type) -> dict[str, Leaf]:
    """Every key of a run spec, in the order of its fields."""
    return {leaf.key: leaf for leaf in _walk(cls, "")}


@cache
def sections(cls: type) -> dict[str, type]:
    """The sections of a run spec (`model`, `data`, …) and their dataclasses; `parallel` among them."""
    hints = get_type_hints(cls).items()
    return {name: kind for name, kind in hints if isinstance(kind, type) and is_dataclass(kind)}


def defaults(cls: type) -> dict[str, Any]:
    """The run spec's defaults as Hydra composes them: nested, hoisted, MISSING_VALUE where required."""
    tree: dict[str, Any] = {}
    for leaf in leaves(cls).values():
        place = tree
        *path, name = leaf.key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[name] = list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
    return tree


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"num_layers": 2}} as {"model.num_layers": 2}; settings named OPTIONS stay whole."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and name != OPTIONS:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The string beneath each field of a dataclass, its own or inherited, whitespace folded."""
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


def _walk(cls: type, prefix: str) -> Iterator[Leaf]:
    types, docs = get_type_hints(cls), field_docs(cls)
    annotations = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        kind = types[item.name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            yield from _walk(kind, prefix if item.name == HOISTED else f"{prefix}{item.name}.")
        else:
            role = role_of(annotations[item.name])
            yield Leaf(f"{prefix}{item.name}", kind, _default(item), docs.get(item.name, ""), role)


def _default(item: "Field[Any]") -> Any:
    if item.default is not MISSING:
        return item.default
    return MISSING_VALUE if item.default_factory is MISSING else item.default_factory()
