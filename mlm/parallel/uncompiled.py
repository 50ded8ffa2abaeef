"""Functions that torch.compile leaves alone."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_chosen: list[list[Callable[..., object]]] = []


def skip_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, which torch.compile does not trace after `prepare_to_compile`.

    torch.compiler.disable at import would load the compiler, 1.6 s of processor time, in every command.
    """
    chosen: list[Callable[..., R]] = [function]
    _chosen.append(chosen)  # type: ignore[arg-type]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return chosen[0](*args, **kwargs)

    return call


def prepare_to_compile() -> None:
    """Keep torch.compile from the functions above. Call before compiling anything."""
    while _chosen:
        chosen = _chosen.pop()
        chosen[0] = torch.compiler.disable(chosen[0])
