"""Imported by each Python that has this folder on its path: pauses in one function until a signal can come.

TORTURE_AT is `module:function:n`, the n-th call, or `module` for its import. TORTURE_MARKS is a folder in
which each process that pauses leaves a file named by its id.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE, _, REST = os.environ.get("TORTURE_AT", "").partition(":")
FUNCTION, _, CALL = REST.partition(":")
PAUSE_S = 1.0


def pause() -> None:
    """Tell that the phase has begun, and stay in it."""
    Path(os.environ["TORTURE_MARKS"], str(os.getpid())).touch()
    time.sleep(PAUSE_S)  # continues after a signal whose handler raises nothing


def paused(function: Any) -> Any:
    """`function`, pausing in its n-th call."""
    calls = 0

    @functools.wraps(function)
    def wrapper(*args: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(CALL):
            pause()
        return function(*args, **settings)

    return wrapper


class Pausing(importlib.abc.MetaPathFinder):
    """Import hook of that one module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Load it as usual, then change the function."""
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        if not FUNCTION:
            pause()
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            *owners, last = FUNCTION.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, last, paused(getattr(owner, last)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if MODULE:
    sys.meta_path.insert(0, Pausing())
