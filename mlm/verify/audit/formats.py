"""Formats narrower than float64: where a rank computes in them, reduces in them, and how they round."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

FORMATS = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Formats by falling precision, and their names in TOLERANCES."""
EPS = {name: torch.finfo(dtype).eps for dtype, name in FORMATS.items()}
COLLECTIVES = ("c10d", "_c10d_functional")
COPIES = {"_to_copy", "copy_", "_foreach_copy_", "clone", "cat", "chunk_cat", "div", "mul", "wait_tensor"}
"""Operations that hand on what was rounded."""


class Formats:
    """Sees each operation of a rank.

    With a seed it moves what narrow formats round, at random, by up to one unit in the last place: so far do
    the numbers of a step vary with the order of its sums.
    """

    def __init__(self, seed: int = 0) -> None:
        self.narrowest: dict[str, str] = {}
        """By module or phase, where that is not float64."""
        self.reductions: dict[str, tuple[str, str]] = {}
        """Formats of operands and of a reduction, by its place, where it is in 16 bits and they are not."""
        self._generator = torch.Generator().manual_seed(seed) if seed else None
        self._rounded: dict[int, tuple[str, str]] = {}
        """Of storages that hold what was rounded to 16 bits: from what, and the place that reduced it."""

    def see(self, func: Any, args: Any, result: Any, place: str, *, is_update: bool) -> None:
        """Note an operation, before anything else reads its result."""
        inputs, outputs = _floats(args), _floats(result) or _floats(args[:1])
        is_collective = func.namespace in COLLECTIVES
        # views are rounded already, and an update rounds each weight as that of any layout does
        is_exact = func.is_view or is_collective or (is_update and func._schema.is_mutable)
        for x in outputs if inputs else ():
            name = FORMATS[x.dtype]
            if name != "fp64" and not bool((x == x.round()).all()):  # counts are not rounded
                self.narrowest[place] = max(self.narrowest.get(place, name), name, key=list(EPS).index)
                if self._generator is not None and not is_exact:
                    moves = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
                    x.copy_(x.double() * (1 + EPS[name] * moves))
        # follow what is rounded to 16 bits to a reduction, and from there to a wider format again
        old = {p: self._rounded[p] for x in inputs if (p := _storage(x)) in self._rounded}
        wide = next((FORMATS[x.dtype] for x in inputs if x.itemsize >= 4 and x.numel() > 1), "")
        narrow = next((FORMATS[x.dtype] for x in inputs if x.itemsize < 4), "")
        for x in outputs:
            new, pointer = None, _storage(x)
            if x.itemsize >= 4:
                self.reductions |= {at: (was, narrow) for was, at in old.values() if at and x.numel() > 1}
            elif is_collective and "reduce" in func._opname and old and _size(args) > 1:
                new = next(iter(old.values()))[0], place
                self._rounded |= dict.fromkeys(old, new)
            elif old and (pointer in old or func._opname in COPIES):
                new = next(iter(old.values()))
            elif wide:
                new = wide, ""
            self._rounded.pop(pointer, None)
            if new is not None:
                self._rounded[pointer] = new


def _floats(tree: Any) -> list[Tensor]:
    """Tensors that hold numbers, unlike DTensors, fake tensors and results of a collective under way."""
    tensors = [x for x in tree_leaves(tree) if type(x) in (Tensor, nn.Parameter)]
    return [x for x in tensors if x.dtype in FORMATS and x.numel()]


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _size(args: Any) -> int:
    """Ranks of a collective, of whose arguments one is its group or the name of that."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf).size()
        if isinstance(leaf, str) and leaf not in ("sum", "avg", "max", "min", "product"):
            return _resolve_process_group(leaf).size()  # type: ignore[arg-type]
    return 1
