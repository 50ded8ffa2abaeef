"""Tensors whose rows two libraries order otherwise, or put into other tensors.

Both consist of the same pieces: `RowLayout` says how the rows of a tensor do.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class RowLayout(NamedTuple):
    """Rows of a tensor: [block][piece][row], of each piece as many rows in every block."""

    pieces: tuple[tuple[str, int], ...]
    """(name, rows in all blocks)."""
    blocks: int

    @property
    def rows(self) -> int:
        """Rows of the tensor."""
        return sum(rows for _, rows in self.pieces)


class RowLayouts(NamedTuple):
    """Tensors in a layer that two libraries make of the same pieces, by name in the layer."""

    ours: Mapping[str, RowLayout]
    theirs: Mapping[str, RowLayout]


def split_layer(name: str) -> tuple[int | None, str]:
    """Return the layer of one of our names, if it is in one, and the rest."""
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return (int(found[1]), found[2]) if found else (None, name)


def short_name(name: str) -> str:
    """Return one of our names without the number of its layer."""
    return split_layer(name)[1]


def split_pieces(value: Tensor, layout: RowLayout) -> dict[str, Tensor]:
    """Return the pieces of a tensor, views [block][row][…]."""
    blocks = value.unflatten(0, (layout.blocks, -1))
    parts = blocks.split([rows // layout.blocks for _, rows in layout.pieces], dim=1)
    return {name: part for (name, _), part in zip(layout.pieces, parts, strict=True)}


def reorder_rows(
    name: str,
    sources: Mapping[str, RowLayout],
    targets: Mapping[str, RowLayout],
    load: Callable[[str], Tensor],
) -> Tensor:
    """Return tensor `name`, one of `targets` by its name in the layer, made of pieces of `sources`.

    `load(name)` returns a tensor of the source. Holds it, and the result, one after the other.
    """
    layer, short = split_layer(name)
    layout = targets[short]
    result: Tensor | None = None
    wanted = [piece for piece, _ in layout.pieces]
    for source, held in sources.items():
        if not any(piece in wanted for piece, _ in held.pieces):
            continue
        value = load(f"layers.{layer}.{source}")
        if result is None:
            result = torch.empty((layout.rows, *value.shape[1:]), dtype=value.dtype)
        places = split_pieces(result, layout)
        for piece, part in split_pieces(value, held).items():
            if piece in places:
                place = places[piece]
                place.copy_(part.reshape(place.shape))
    assert result is not None, f"no source of {name}"
    return result
