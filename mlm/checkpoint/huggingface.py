"""Parameters as `transformers` names and stores them, and as we do, both ways.

Works on plain tensors: neither library's model is built here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where `transformers` keeps a parameter of ours, and how it lies there."""

    name: str
    """Without the prefix of the base model."""
    transposed: bool = False
    """Stored [in, out]; ours is [out, in]."""
    num_heads: int | None = None
    """Of a fused qkv: theirs is [q | k | v], each by head, ours [head][q, k, v]. None for all others."""

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Shape there of a parameter that has this shape here."""
        return ours[::-1] if self.transposed else ours

    def to_ours(self, value: Tensor) -> Tensor:
        """Their tensor as ours: a view where that can be had."""
        value = value.t() if self.transposed else value
        if self.num_heads is None:
            return value
        return value.unflatten(0, (3, self.num_heads, -1)).transpose(0, 1).flatten(0, 2)

    def to_theirs(self, value: Tensor) -> Tensor:
        """Inverse of `to_ours`."""
        if self.num_heads is not None:
            value = value.unflatten(0, (self.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return value.t() if self.transposed else value


_GPT2_LAYER = {  # ours -> (theirs, whether their weight is stored [in, out])
    "attention_norm": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.out": ("attn.c_proj", True),
    "mlp_norm": ("ln_2", False),
    "mlp.up": ("mlp.c_fc", True),
    "mlp.down": ("mlp.c_proj", True),
}
GPT2_PREFIX = "transformer."
"""In the names of GPT2LMHeadModel, not in those of GPT2Model."""
GPT2_TIED = "lm_head.weight"
"""Output layer; the same table as wte.weight."""
GPT2_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Causal masks, which old versions stored."""


def gpt2_places(num_layers: int, num_heads: int) -> Iterator[tuple[str, Place]]:
    """(our name, place) of every parameter of GPT-2, in the order of the model."""
    yield "token.weight", Place("wte.weight")
    yield "position.weight", Place("wpe.weight")
    for layer in range(num_layers):
        for ours, (theirs, transposed) in _GPT2_LAYER.items():
            heads = num_heads if ours == "attention.qkv" else None
            for part in ("weight", "bias"):
                place = Place(f"h.{layer}.{theirs}.{part}", transposed and part == "weight", heads)
                yield f"layers.{layer}.{ours}.{part}", place
    yield "final_norm.weight", Place("ln_f.weight")
    yield "final_norm.bias", Place("ln_f.bias")


def gpt2_from_huggingface(state: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """Whole (unsplit) parameters of `mlm.models.gpt2.GPT2` from a GPT2LMHeadModel's or GPT2Model's state.

    Raises KeyError for a name that GPT-2 does not have.
    """
    layers = [int(found[1]) for name in state if (found := re.search(r"\bh\.(\d+)\.", name))]
    places = {
        place.name: (ours, place) for ours, place in gpt2_places(max(layers, default=-1) + 1, num_heads)
    }
    out: dict[str, Tensor] = {}
    for theirs, value in state.items():
        name = theirs.removeprefix(GPT2_PREFIX)
        if name == GPT2_TIED or GPT2_BUFFERS.fullmatch(name):
            continue
        if name not in places:
            raise KeyError(f"{theirs!r} is not a parameter of GPT-2")
        ours, place = places[name]
        out[ours] = place.to_ours(value)
    return out
