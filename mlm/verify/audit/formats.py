"""Formats narrower than float64: where a rank computes or reduces in them, and how they round."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

FORMATS = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Names in TOLERANCES, by falling precision."""
EPS = {name: torch.finfo(dtype).eps for dtype, name in FORMATS.items()}
COLLECTIVES = ("c10d", "_c10d_functional")


class Formats:
    """Observes each operation of a rank.

    With a seed, adds noise of up to one unit in the last place to results in narrow formats: another order of
    sums changes them as much.
    """

    def __init__(self, seed: int = 0) -> None:
        self.narrowest: dict[str, str] = {}
        """By module or phase: its narrowest format, unless float64."""
        self.reductions: dict[str, str] = {}
        """By module or phase: format of its collective sums of 16 bits."""
        self._generator = torch.Generator().manual_seed(seed) if seed else None

    def observe(self, func: Any, args: Any, result: Any, place: str, *, is_update: bool) -> None:
        """Observe an operation before others read its result."""
        inputs, outputs = _floats(args), _floats(result) or _floats(args[:1])
        is_collective = func.namespace in COLLECTIVES
        for x in inputs if is_collective and "reduce" in func._opname else ():
            if x.itemsize < 4:
                self.reductions[place] = FORMATS[x.dtype]
        # views are rounded already, and every layout rounds updated weights alike
        is_exact = func.is_view or is_collective or (is_update and func._schema.is_mutable)
        for x in outputs if inputs else ():
            name = FORMATS[x.dtype]
            if name != "fp64" and not bool((x == x.round()).all()):  # counts are not rounded
                self.narrowest[place] = max(self.narrowest.get(place, name), name, key=list(EPS).index)
                if self._generator is not None and not is_exact:
                    noise = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
                    x.copy_(x.double() * (1 + EPS[name] * noise))


def _floats(tree: Any) -> list[Tensor]:
    """Plain tensors: no DTensors, fake tensors or results of a pending collective."""
    tensors = [x for x in tree_leaves(tree) if type(x) in (Tensor, nn.Parameter)]
    return [x for x in tensors if x.dtype in FORMATS and x.numel()]
