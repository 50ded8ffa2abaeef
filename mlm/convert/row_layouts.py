"""Tensors whose rows two libraries order differently, or distribute over different tensors.

Both build their tensors of the same pieces: a `RowLayout` says how the rows of a tensor consist of them.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class RowLayout(NamedTuple):
    """Rows of a tensor as [block][piece][row]; every block has an equal share of each piece."""

    pieces: tuple[tuple[str, int], ...]
    """(name, rows in all blocks)."""
    blocks: int

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.pieces)

    def split(self, value: Tensor) -> dict[str, Tensor]:
        """Return the pieces of a tensor by name, as views [block][row][…]."""
        sizes = [rows // self.blocks for _, rows in self.pieces]
        parts = value.unflatten(0, (self.blocks, -1)).split(sizes, dim=1)
        return {name: part for (name, _), part in zip(self.pieces, parts, strict=True)}


class RowLayouts(NamedTuple):
    """Tensors of a layer that two libraries build of the same pieces, by name in the layer."""

    ours: Mapping[str, RowLayout]
    theirs: Mapping[str, RowLayout]


def split_layer(name: str) -> tuple[int | None, str]:
    """Return the layer number in one of our names, None outside the layers, and the rest of the name."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return (int(match[1]), match[2]) if match else (None, name)


def short_name(name: str) -> str:
    return split_layer(name)[1]


def reorder_rows(
    name: str,
    sources: Mapping[str, RowLayout],
    targets: Mapping[str, RowLayout],
    load: Callable[[str], Tensor],
) -> Tensor:
    """Return tensor `name`, one of `targets` by its name in the layer, built of the pieces of `sources`.

    `load(name)` returns a tensor of the source. One of them is in memory at a time, beside the result.
    """
    layer, short = split_layer(name)
    layout = targets[short]
    wanted = {piece for piece, _ in layout.pieces}
    result: Tensor | None = None
    for source, source_layout in sources.items():
        if wanted.isdisjoint(piece for piece, _ in source_layout.pieces):
            continue
        value = load(f"layers.{layer}.{source}")
        if result is None:
            result = torch.empty((layout.rows, *value.shape[1:]), dtype=value.dtype)
        targets_of = layout.split(result)
        for piece, part in source_layout.split(value).items():
            if piece in wanted:
                targets_of[piece].copy_(part.reshape(targets_of[piece].shape))
    assert result is not None, f"no source of {name}"
    return result
