"""Tensors whose rows two libraries order otherwise, or put into other tensors (mlm/convert/megatron)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mlm.convert.megatron.mapping import Woven, split_layer


def unweave(value: Tensor, woven: Woven) -> dict[str, Tensor]:
    """Return the pieces of a tensor, views [block][row][…]."""
    blocks = value.unflatten(0, (woven.blocks, -1))
    parts = blocks.split([rows // woven.blocks for _, rows in woven.pieces], dim=1)
    return {name: part for (name, _), part in zip(woven.pieces, parts, strict=True)}


def reweave(
    name: str,
    sources: Mapping[str, Woven],
    targets: Mapping[str, Woven],
    load: Callable[[str], Tensor],
) -> Tensor:
    """Return tensor `name`, one of `targets` by its name in the layer, made of pieces of `sources`.

    `load(name)` returns a tensor of the source. Holds it, and the result, one after the other.
    """
    layer, short = split_layer(name)
    woven = targets[short]
    result: Tensor | None = None
    wanted = [piece for piece, _ in woven.pieces]
    for source, held in sources.items():
        if not any(piece in wanted for piece, _ in held.pieces):
            continue
        value = load(f"layers.{layer}.{source}")
        if result is None:
            result = torch.empty((woven.rows, *value.shape[1:]), dtype=value.dtype)
        places = unweave(result, woven)
        for piece, part in unweave(value, held).items():
            if piece in places:
                place = places[piece]
                place.copy_(part.reshape(place.shape))
    assert result is not None, f"no source of {name}"
    return result
