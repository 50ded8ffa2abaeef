"""Products over tp in parts of the sequence, communicated while others are multiplied.

A layer split by column gathers its input before the product (with sequence parallelism), one split by row
sums its output after it. In k parts only the first gather and the last sum have no product beside them. Where
ranks hold rows of their own, a part is of the rows of each.

Shapes: S sequence, B micro-batch, I in, O out, t = tensor-parallel size, k parts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlm.parallel.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from mlm.parallel.mesh import Axis

Product = Callable[[Tensor], Tensor]
"""[…, I] -> […, O], each row for itself."""


def gathered_products(x: Tensor, tp: Axis, parts: int, products: Sequence[Product]) -> list[Tensor]:
    """Return products of the rows of all ranks: [S/t, B, I] -> [S, B, O] each.

    Args:
        x: this rank's rows.
        tp: the ranks.
        parts: k, which must divide S/t.
        products: maps of a part's rows [S/k, B, I].
    """
    arriving = [start_all_gather(part, tp) for part in x.chunk(parts)]
    found: list[Tensor] = []
    for i, pending in enumerate(arriving):
        rows = pending.wait()  # [t, S/(tk), B, I]
        made = [product(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]) for product in products]
        if not found:
            found = [part.new_empty((tp.size, parts, *part.shape[1:])) for part in made]
        for whole, part in zip(found, made, strict=True):
            whole[:, i] = part
    return [whole.flatten(0, 2) for whole in found]


def scattered_product(x: Tensor, tp: Axis, parts: int, product: Product) -> Tensor:
    """Return this rank's rows of the sum over tp: [S, B, I/t] -> [S/t, B, O]. tk must divide S."""
    rows = x.unflatten(0, (tp.size, parts, -1))  # [t, k, S/(tk), B, I/t]
    leaving = [start_reduce_scatter(product(rows[:, i].flatten(0, 1)), tp) for i in range(parts)]
    return torch.cat([pending.wait() for pending in leaving])


def summed_product(x: Tensor, tp: Axis, parts: int, product: Product) -> Tensor:
    """Return the sum over tp: [S, B, I/t] -> [S, B, O]. k must divide S."""
    leaving = [start_all_reduce(product(part), tp) for part in x.chunk(parts)]
    return torch.cat([pending.wait() for pending in leaving])
