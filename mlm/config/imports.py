"""Objects of user code, named by import path: `model.kind=my_package.my_family:FAMILY`.

Importing a module runs its code, and checkpoints and run folders come from anyone. So only trusted modules
and their submodules are imported: modules of paths typed on the command line or in YAML that it chooses, and
those in the environment variable MLM_TRUST (`my_package,other.module`). Other paths in saved files are data.
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
    """A name that is neither shipped nor an object in trusted code."""


def is_path(value: object) -> bool:
    """True for `package.module:NAME`."""
    return isinstance(value, str) and PATH.fullmatch(value) is not None


def paths_in(value: object) -> list[str]:
    """Return the import paths in a value: a path, `use` with fields, or a list of these."""
    values = value if isinstance(value, list | tuple) else [value]
    named = (item.get("use") if isinstance(item, dict) else item for item in values)
    return [str(path) for path in named if is_path(path)]


def imported(key: str, path: str, shipped: Collection[str], kind: Any = object, *, typed: str = "") -> Any:
    """Return the object of class `kind` at the import path of a key; None for one of the `shipped` values.

    `typed`: the setting that trusts the path, by default key=path. Raises OwnCodeError for a missing object
    or untrusted code.
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
    """True if MLM_TRUST names a module, its package, or an import path."""
    trusted = filter(None, os.environ.get(TRUST, "").replace(" ", "").split(","))
    return any(name == module or name.startswith(f"{module}.") for module in trusted)


def trust(*modules: str) -> None:
    """Trust modules or import paths, in this process and its children."""
    trusted = os.environ.get(TRUST)
    os.environ[TRUST] = ",".join([*([trusted] if trusted else []), *modules])


@contextmanager
def trusting(typed: Iterable[object], paths: Iterable[str] = ()) -> Iterator[None]:
    """Trust the modules of import paths among typed values, and `paths`, while inside."""
    before = os.environ.get(TRUST)
    trust(*(path.partition(":")[0] for value in typed for path in paths_in(value)), *paths)
    try:
        yield
    finally:
        os.environ.pop(TRUST, None)
        if before is not None:
            os.environ[TRUST] = before
