"""Parameters as `transformers` names and stores them, and as we do, both ways.

Works on plain tensors: neither library's model is built here. BERT's names are in hf_bert.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlm.models.config import ModelConfig


@dataclass(frozen=True)
class Place:
    """Where `transformers` keeps a parameter of ours, and how it lies there."""

    names: tuple[str, ...]
    """Without the prefix of the base model. Of several (query, key, value), equal in size, ours is made end
    to end along dim 0."""
    transposed: bool = False
    """Stored [in, out]; ours is [out, in]."""
    num_heads: int | None = None
    """Of a fused qkv: theirs is [q | k | v], each by head, ours [head][q, k, v]. None for all others."""

    @property
    def is_plain(self) -> bool:
        """Whether it lies there as here."""
        return len(self.names) == 1 and not self.transposed and self.num_heads is None

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Shape there, of each tensor, for a parameter that has this shape here."""
        there = ours[::-1] if self.transposed else ours
        return (there[0] // len(self.names), *there[1:])

    def to_ours(self, values: Sequence[Tensor]) -> Tensor:
        """Their tensors as ours: a view where that can be had."""
        value = values[0] if len(values) == 1 else torch.cat(list(values))
        value = value.t() if self.transposed else value
        if self.num_heads is None:
            return value
        return value.unflatten(0, (3, self.num_heads, -1)).transpose(0, 1).flatten(0, 2)

    def to_theirs(self, value: Tensor) -> tuple[Tensor, ...]:
        """Inverse of `to_ours`."""
        if self.num_heads is not None:
            value = value.unflatten(0, (self.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        value = value.t() if self.transposed else value
        return value.chunk(len(self.names))


def weight_and_bias(
    ours: str, *theirs: str, transposed: bool = False, num_heads: int | None = None
) -> Iterator[tuple[str, Place]]:
    """(our name, place) of both parameters of a module."""
    for part in ("weight", "bias"):
        names = tuple(f"{module}.{part}" for module in theirs)
        yield f"{ours}.{part}", Place(names, transposed and part == "weight", num_heads)


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
GPT2_TIED = {"lm_head.weight": "wte.weight"}
"""The output layer is the token table."""
GPT2_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Causal masks, which old versions stored."""


def gpt2_places(model: ModelConfig) -> Iterator[tuple[str, Place]]:
    """(our name, place) of every parameter of GPT-2, in the order of the model.

    A classifier's bias has none: GPT2ForSequenceClassification computes as if it were zero.
    """
    yield "token.weight", Place(("wte.weight",))
    yield "position.weight", Place(("wpe.weight",))
    for layer in range(model.num_layers):
        for ours, (theirs, transposed) in _GPT2_LAYER.items():
            heads = model.num_heads if ours == "attention.qkv" else None
            name = f"h.{layer}.{theirs}"
            yield from weight_and_bias(f"layers.{layer}.{ours}", name, transposed=transposed, num_heads=heads)
    yield from weight_and_bias("final_norm", "ln_f")
    if model.head == "classification":
        yield "classifier.weight", Place(("score.weight",))
    if model.head == "span":
        yield from weight_and_bias("classifier", "qa_outputs")


def gpt2_from_huggingface(state: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """Unsplit parameters of `mlm.models.gpt2.model.GPT2` from a GPT2LMHeadModel's or GPT2Model's state.

    Raises KeyError for a name that GPT-2 does not have.
    """
    layers = [int(found[1]) for name in state if (found := re.search(r"\bh\.(\d+)\.", name))]
    shape = ModelConfig(num_layers=max(layers, default=-1) + 1, hidden_size=num_heads, num_heads=num_heads)
    places = {place.names[0]: (ours, place) for ours, place in gpt2_places(shape)}
    out: dict[str, Tensor] = {}
    for theirs, value in state.items():
        name = theirs.removeprefix(GPT2_PREFIX)
        if name in GPT2_TIED or GPT2_BUFFERS.fullmatch(name):
            continue
        if name not in places:
            raise KeyError(f"{theirs!r} is not a parameter of GPT-2")
        ours, place = places[name]
        out[ours] = place.to_ours([value])
    return out
