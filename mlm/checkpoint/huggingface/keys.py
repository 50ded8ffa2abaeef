"""Keys of a config.json of `transformers`, checked: what our models can be told, and what they cannot."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlm.checkpoint.native.format import JSON
from mlm.errors import ConfigError

EXACT_GELU = ("gelu",)
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of one function: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
GELU_NAMES = {"gelu": EXACT_GELU[0], "gelu_tanh": TANH_GELU[0]}
"""Our model.activation -> theirs."""


def activation(name: str) -> Literal["gelu", "gelu_tanh"]:
    """Our model.activation for one of their names above."""
    return "gelu" if name in EXACT_GELU else "gelu_tanh"


EVERYWHERE: dict[str, tuple[JSON, ...]] = {
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "transformers_weights": (None,),  # another file of weights than those we read
}
"""What no family of ours has: for `Keys.one_way`."""


@dataclass(frozen=True)
class Keys:
    """What is read of a family's config.json. The bounds limit what a hostile file makes us build."""

    one_way: Mapping[str, tuple[JSON, ...]]
    """Key -> what it may be; the first is what a missing key means."""
    sizes: Mapping[str, tuple[int | None, int]]
    """Key -> (default, largest). Whole numbers from 1; with the default None it may be null."""
    numbers: Mapping[str, tuple[float, float, float]]
    """Key -> (default, least, below)."""
    heads: tuple[str, str]
    """The keys of a width and of the number of heads that must divide it."""


def read_keys(said: Mapping[str, JSON], keys: Keys, path: str, name: str) -> dict[str, Any]:
    """The value of every key of `keys`. Raises ConfigError: a line for each that our model cannot be."""
    faults = []
    found: dict[str, Any] = {key: said.get(key, allowed[0]) for key, allowed in keys.one_way.items()}
    for key, allowed in keys.one_way.items():
        if not any(type(found[key]) is type(one) and found[key] == one for one in allowed):
            meant = " or ".join(json.dumps(one) for one in allowed)
            faults.append(
                f"{path}: {key}={show(found[key])} is not what our {name} computes; supported: {meant}"
            )
    for key, (default, most) in keys.sizes.items():
        value = found[key] = said.get(key, default)
        if (value is None and default is None) or (type(value) is int and 0 < value <= most):
            continue
        faults.append(f"{path}: {key}={show(value)} must be a whole number from 1 to {most}")
    for key, (standard, least, below) in keys.numbers.items():
        value = found[key] = said.get(key, standard)
        if type(value) not in (int, float) or not least <= value < below:
            faults.append(f"{path}: {key}={show(value)} must be a number, at least {least} and below {below}")
    width, heads = keys.heads
    if not faults and found[width] % found[heads]:
        faults.append(f"{path}: {width}={found[width]} must be a multiple of {heads}={found[heads]}")
    if faults:
        raise ConfigError(faults)
    return found


def show(value: JSON) -> str:
    """A value of a file in a message: short, on one line."""
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
