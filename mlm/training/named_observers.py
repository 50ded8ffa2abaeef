"""Observers named by `train.observers`: built on each rank, and checked before ranks start."""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, isclass, signature
from typing import Annotated, Any, get_origin, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError

from mlm.config.build import problem_of_value
from mlm.config.fields import Bound, ObserverEntry, metadata
from mlm.config.imports import OwnCodeError, imported
from mlm.config.suggest import nearest
from mlm.config.tree import Leaf
from mlm.training.gradient_norms import GradientNorms
from mlm.training.observer import Observer
from mlm.util.errors import Problem, format_value

KEY = "train.observers"
SHIPPED: Mapping[str, type[Observer]] = {"mlm.training.gradient_norms:GradientNorms": GradientNorms}
"""Observers that saved settings may name without being typed again."""


def observer_problems(entries: Sequence[ObserverEntry]) -> list[Problem]:
    try:
        named_observers(entries)
    except OwnCodeError as error:
        return list(error.problems)
    return []


def named_observers(entries: Sequence[ObserverEntry]) -> list[Observer]:
    """Build the observers that train.observers names. Raises OwnCodeError (a UserError)."""
    return [_build(entry) for entry in entries]


def _build(entry: ObserverEntry) -> Observer:
    fields: dict[str, Any] = {"use": entry} if isinstance(entry, str) else dict(entry)
    path = fields.pop("use", None)
    if not isinstance(path, str):
        problem = f"{KEY}=[{format_value(entry)}]: names no observer"
        raise OwnCodeError(problem, keys=(KEY,), fix="add use: package.module:NAME")
    typed = f"'{KEY}=[{format_value(entry)}]'"
    target: Callable[..., object] = SHIPPED.get(path) or imported(KEY, path, SHIPPED, Callable, typed=typed)
    arguments = checked_fields(path, target, fields)
    try:
        observer = target(**arguments)
    except Exception as error:
        problem = f"{KEY}={path}: building it fails ({type(error).__name__}: {error})"
        raise OwnCodeError(problem, keys=(KEY,), fix="correct it, or its fields") from error
    if not isinstance(observer, Observer):
        raise OwnCodeError(
            f"{KEY}={path}: makes no mlm.training.observer.Observer; derive it from that class", keys=(KEY,)
        )
    return observer


def checked_fields(path: str, target: Callable[..., object], fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of an observer to the types that its class declares.

    Raises OwnCodeError for a field that is unknown, missing, of another type, or outside its `Bound`.
    """
    try:
        parameters = dict(signature(target).parameters)
        hints = get_type_hints(target.__init__ if isclass(target) else target, include_extras=True)
    except (TypeError, ValueError, NameError):  # C code, or unresolvable annotations
        return fields
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    required = [name for name, p in parameters.items() if p.kind not in variadic and p.default is p.empty]
    for name, value in fields.items():
        if name not in parameters and not takes_any:
            near = nearest(name, list(parameters))
            fix = f"did you mean {near}?" if near else f"its fields: {', '.join(parameters) or 'none'}"
            raise OwnCodeError(
                f"{KEY}={path}: {name}={format_value(value)} is not a field of it", keys=(KEY,), fix=fix
            )
    for name in (name for name in required if name not in fields):
        fix = f"write {KEY}=[{{use: {path}, {name}: …}}]"
        raise OwnCodeError(f"{KEY}={path}: its field {name} is required", keys=(KEY,), fix=fix)
    typed = dict(fields)
    for name, value in fields.items():
        annotation = hints.get(name, Any)
        kind = annotation.__origin__ if get_origin(annotation) is Annotated else annotation
        bound = metadata(annotation, Bound)
        try:
            adapter = TypeAdapter(kind)
        except PydanticSchemaGenerationError:  # not a type of YAML values
            continue
        leaf = Leaf(key=name, type=kind, default=None, doc="", bound=bound)
        problem = problem_of_value(leaf, value) or (bound and bound.problem(name, value))
        if problem:
            fix = problem.fix or f"correct {name}"
            raise OwnCodeError(f"{KEY}={path}: {problem.problem}", keys=(KEY,), fix=fix)
        typed[name] = adapter.validate_python(value)
    return typed
