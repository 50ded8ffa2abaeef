"""Objects of the user's own code, named by import path: `model.kind=my_package.my_family:FAMILY`.

Importing a module runs its code, and checkpoints and run folders come from anyone. So a path is followed
only into trusted modules: modules of paths that are typed on the command line, or stand in YAML that the
command line chooses, and those named in the environment variable MLM_TRUST (`my_package,other.module`),
each with the modules below it. A path in a saved file is data until one of these names its module.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from mlm.config.suggest import nearest
from mlm.util.errors import UserError

TRUST = "MLM_TRUST"
PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class OwnCodeError(UserError):
    """A name that is neither shipped nor leads to an object in trusted code."""


def is_path(value: object) -> bool:
    """True for `package.module:NAME`."""
    return isinstance(value, str) and PATH.fullmatch(value) is not None


def paths_in(value: object) -> list[str]:
    """Return the import paths that a value of a key is, or lists: alone, or as `use` with fields."""
    values = value if isinstance(value, list | tuple) else [value]
    named = (item.get("use") if isinstance(item, dict) else item for item in values)
    return [str(path) for path in named if is_path(path)]


def imported(key: str, path: str, shipped: Collection[str], kind: Any = object, *, typed: str = "") -> Any:
    """Return what the import path of a key names, of class `kind`; None for one of the `shipped` values.

    `typed` is what a user types to trust the path, where that is more than the key and the path. Raises
    OwnCodeError for a path that leads nowhere, or into code that is not trusted.
    """
    if path in shipped:
        return None
    if not is_path(path):
        package, _, name = path.rpartition(".")
        near = f"{package}:{name}" if is_path(f"{package}:{name}") else nearest(path, shipped)
        hint = f"did you mean {key}={near}?" if near else f"use {', '.join(shipped)} or package.module:NAME"
        raise OwnCodeError(f"{key}={path}: no such choice; {hint}")
    module, _, name = path.partition(":")
    if not is_trusted(module) and not is_trusted(path):
        raise OwnCodeError(
            f"{key}={path}: named in a saved file, whose code is not run unasked; if you trust it, type "
            f"{typed or f'{key}={path}'} or set {TRUST}={module}"
        )
    try:
        target = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise OwnCodeError(f"{key}={path}: {error}; install it, or put its folder on PYTHONPATH") from error
    except AttributeError as error:
        raise OwnCodeError(f"{key}={path}: {error}; correct the name") from error
    except Exception as error:
        raise OwnCodeError(
            f"{key}={path}: importing {module} fails ({type(error).__name__}: {error}); correct it"
        ) from error
    if not isinstance(target, kind):
        raise OwnCodeError(f"{key}={path}: not a {kind.__name__} but a {type(target).__name__}; name another")
    return target


def is_trusted(name: str) -> bool:
    """True if MLM_TRUST names a module or an import path, or a package that holds the module."""
    trusted = filter(None, os.environ.get(TRUST, "").replace(" ", "").split(","))
    return any(name == module or name.startswith(f"{module}.") for module in trusted)


def trust(*modules: str) -> None:
    """Let import paths lead into these modules, or be these, in this process and those that it starts."""
    known = os.environ.get(TRUST)
    os.environ[TRUST] = ",".join([*([known] if known else []), *modules])


@contextmanager
def trusting(typed: Iterable[object], paths: Iterable[str] = ()) -> Iterator[None]:
    """Trust the modules of the import paths among values that the user typed, and `paths`, for a while."""
    before = os.environ.get(TRUST)
    trust(*(path.partition(":")[0] for value in typed for path in paths_in(value)), *paths)
    try:
        yield
    finally:
        os.environ.pop(TRUST, None)
        if before is not None:
            os.environ[TRUST] = before
