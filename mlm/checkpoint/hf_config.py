"""config.json of `transformers` and our model settings, both ways.

Keys and their defaults: the documentation of GPT2Config
(https://huggingface.co/docs/transformers/model_doc/gpt2). What our model does not compute is refused.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mlm.checkpoint.format import JSON
from mlm.checkpoint.huggingface import GPT2_BUFFERS, GPT2_PREFIX, GPT2_TIED, Place, gpt2_places
from mlm.config.errors import ConfigError, UserError
from mlm.config.model_schema import ModelConfig


@dataclass(frozen=True)
class Family:
    """A kind of model that we share with `transformers`."""

    architecture: str
    """Name of its class there."""
    prefix: str
    """What their names may begin with: the base model inside the class."""
    tied: tuple[str, str]
    """(an output table that may be stored once more, the parameter it must equal)."""
    ignored: "re.Pattern[str]"
    """Names that are stored and are no parameters."""
    read: Callable[[Mapping[str, JSON], str], tuple[ModelConfig, list[str]]]
    """(config.json, its path for messages) -> our settings, and what differs without being refused."""
    write: Callable[[ModelConfig, int | None], dict[str, JSON]]
    """(our settings, id of the end-of-document token) -> config.json."""
    places: Callable[[ModelConfig], Iterator[tuple[str, Place]]]
    """(our name, place) of every parameter."""


TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the one function that ours is: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""

_ONE_WAY: dict[str, tuple[JSON, ...]] = {  # key -> what it may be; the first is what a missing key means
    "activation_function": TANH_GELU,
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "transformers_weights": (None,),  # another file of weights than those we read
}
# reorder_and_upcast_attn is not here: it says in which precision and order the same products are formed.

_SIZES = {  # key -> (default, largest): bounds what a hostile file makes us build
    "vocab_size": (50257, 1 << 24),
    "n_positions": (1024, 1 << 24),
    "n_embd": (768, 1 << 20),
    "n_layer": (12, 10_000),
    "n_head": (12, 1 << 20),
}
_ALIASES = {  # what GPT2Config takes for the same settings
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
_NUMBERS = {  # key -> (default, least, below)
    "resid_pdrop": (0.1, 0.0, 1.0),
    "embd_pdrop": (0.1, 0.0, 1.0),
    "attn_pdrop": (0.1, 0.0, 1.0),
    "layer_norm_epsilon": (1e-5, 0.0, 1.0),
    "initializer_range": (0.02, 0.0, 1e3),
}


def read_gpt2_config(said: Mapping[str, JSON], path: str) -> tuple[ModelConfig, list[str]]:
    """Our settings for a GPT2Config, and notes on what is taken differently. Raises ConfigError."""
    said = {_ALIASES[k]: v for k, v in said.items() if k in _ALIASES} | dict(said)
    faults = []
    for key, allowed in _ONE_WAY.items():
        value = said.get(key, allowed[0])
        if value not in allowed:
            meant = " or ".join(json.dumps(a) for a in allowed)
            faults.append(f"{path}: {key}={show(value)} is not what our GPT-2 computes; supported: {meant}")
    sizes = {key: said.get(key, default) for key, (default, _) in _SIZES.items()}
    inner = said.get("n_inner")
    for key, value in [*sizes.items(), *([] if inner is None else [("n_inner", inner)])]:
        most = _SIZES.get(key, (0, 1 << 24))[1]
        if type(value) is not int or not 0 < value <= most:
            faults.append(f"{path}: {key}={show(value)} must be a whole number from 1 to {most}")
    numbers = {key: said.get(key, default) for key, (default, _, _) in _NUMBERS.items()}
    for key, value in numbers.items():
        _, least, below = _NUMBERS[key]
        if type(value) not in (int, float) or not least <= value < below:
            faults.append(f"{path}: {key}={show(value)} must be a number, at least {least} and below {below}")
    if not faults and sizes["n_embd"] % sizes["n_head"]:
        faults.append(f"{path}: n_embd={sizes['n_embd']} must be a multiple of n_head={sizes['n_head']}")
    if faults:
        raise ConfigError(faults)
    notes = []
    if numbers["embd_pdrop"] != numbers["resid_pdrop"]:
        notes.append(
            f"embd_pdrop={numbers['embd_pdrop']} is not kept: model.hidden_dropout is one number for the "
            f"embeddings and the residual branches, resid_pdrop={numbers['resid_pdrop']} is taken"
        )
    model = ModelConfig(
        num_layers=sizes["n_layer"],
        hidden_size=sizes["n_embd"],
        num_heads=sizes["n_head"],
        ffn_hidden_size=inner,
        max_positions=sizes["n_positions"],
        vocab_size=sizes["vocab_size"],
        hidden_dropout=float(numbers["resid_pdrop"]),
        attention_dropout=float(numbers["attn_pdrop"]),
        init_std=float(numbers["initializer_range"]),
        layer_norm_eps=float(numbers["layer_norm_epsilon"]),
    )
    return model, notes


def write_gpt2_config(model: ModelConfig, eod_id: int | None) -> dict[str, JSON]:
    """The config.json that GPT2LMHeadModel loads."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.max_positions,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": TANH_GELU[0],
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.layer_norm_eps,
        "initializer_range": model.init_std,
        "bos_token_id": eod_id,
        "eos_token_id": eod_id,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        prefix=GPT2_PREFIX,
        tied=(GPT2_TIED, "wte.weight"),
        ignored=GPT2_BUFFERS,
        read=read_gpt2_config,
        write=write_gpt2_config,
        places=lambda model: gpt2_places(model.num_layers, model.num_heads),
    )
}
"""By `model_type` of config.json, which is `kind` of our settings too."""

_TO_COME = {"bert": "BERT", "megatron-bert": "BERT"}


def family_of(said: Mapping[str, JSON], path: str) -> Family:
    """The family that a config.json is of. Raises UserError for one we do not have."""
    kind = said.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    supported = f"supported: {', '.join(FAMILIES)}"
    if kind in _TO_COME:
        raise UserError(f"{path}: model_type={kind} comes with mlm's {_TO_COME[kind]}; {supported}")
    raise UserError(f"{path}: model_type={show(kind)} is not a model of ours; {supported}")


def show(value: JSON) -> str:
    """A value of a file in a message: short, on one line."""
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
