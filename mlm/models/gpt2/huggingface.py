"""config.json of GPT-2 and our model settings, both ways; which head a folder of it has.

Keys and their defaults: the documentation of GPT2Config
(https://huggingface.co/docs/transformers/model_doc/gpt2).
"""

from collections.abc import Mapping
from dataclasses import replace

from mlm.checkpoint.huggingface.content import Content, Head, Ids, labels, one_head
from mlm.checkpoint.huggingface.keys import (
    EVERYWHERE,
    EXACT_GELU,
    GELU_NAMES,
    TANH_GELU,
    Keys,
    activation,
    read_keys,
)
from mlm.checkpoint.native.format import JSON
from mlm.models.config import ModelConfig

ARCHITECTURES = {
    "language_model": "GPT2LMHeadModel",
    "none": "GPT2Model",
    "classification": "GPT2ForSequenceClassification",
    "span": "GPT2ForQuestionAnswering",
}
_KEYS = Keys(
    one_way=EVERYWHERE
    | {
        "activation_function": (*TANH_GELU, *EXACT_GELU),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        # not here: reorder_and_upcast_attn, which says how precisely and in which order products are formed
    },
    sizes={
        "vocab_size": (50257, 1 << 24),
        "n_positions": (1024, 1 << 24),
        "n_embd": (768, 1 << 20),
        "n_layer": (12, 10_000),
        "n_head": (12, 1 << 20),
        "n_inner": (None, 1 << 24),
    },
    numbers={
        "resid_pdrop": (0.1, 0.0, 1.0),
        "embd_pdrop": (0.1, 0.0, 1.0),
        "attn_pdrop": (0.1, 0.0, 1.0),
        "layer_norm_epsilon": (1e-5, 0.0, 1.0),
        "initializer_range": (0.02, 0.0, 1e3),
    },
    heads=("n_embd", "n_head"),
)
_ALIASES = {  # what GPT2Config takes for the same settings
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}


def read_gpt2_config(said: Mapping[str, JSON], path: str) -> tuple[ModelConfig, list[str]]:
    """Our settings for a GPT2Config, and notes on what is taken differently. Raises ConfigError."""
    said = {_ALIASES[k]: v for k, v in said.items() if k in _ALIASES} | dict(said)
    found = read_keys(said, _KEYS, path, "GPT-2")
    notes = []
    if found["embd_pdrop"] != found["resid_pdrop"]:
        notes.append(
            f"embd_pdrop={found['embd_pdrop']} is not kept: model.hidden_dropout is one number for the "
            f"embeddings and the residual branches, resid_pdrop={found['resid_pdrop']} is taken"
        )
    model = ModelConfig(
        num_layers=found["n_layer"],
        hidden_size=found["n_embd"],
        num_heads=found["n_head"],
        ffn_hidden_size=found["n_inner"],
        max_positions=found["n_positions"],
        vocab_size=found["vocab_size"],
        activation=activation(found["activation_function"]),
        hidden_dropout=float(found["resid_pdrop"]),
        attention_dropout=float(found["attn_pdrop"]),
        init_std=float(found["initializer_range"]),
        layer_norm_eps=float(found["layer_norm_epsilon"]),
    )
    return model, notes


def write_gpt2_config(model: ModelConfig, ids: Ids) -> dict[str, JSON]:
    """The config.json that the class of its head loads."""
    return {
        "architectures": [ARCHITECTURES[model.head]],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.max_positions,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": GELU_NAMES[model.activation],
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.layer_norm_eps,
        "initializer_range": model.init_std,
        "bos_token_id": ids.eod,
        "eos_token_id": ids.eod,
        "tie_word_embeddings": True,
        "dtype": "float32",
        # the padding behind which their classifier looks for the last token
        **({"pad_token_id": ids.eod} if model.head == "classification" else {}),
        **({} if ids.pad is None else {"pad_token_id": ids.pad}),
        **(labels(model, ids.labels) if model.head == "classification" else {}),
    }


def gpt2_content(model: ModelConfig, found: Mapping[str, tuple[int, ...]], path: str) -> Content:
    """What a folder with tensors of these names and shapes is: without a head of its own, GPT2LMHeadModel,
    whose output layer is the token table. Raises UserError for two heads."""
    heads: dict[Head, str] = {"classification": "score.weight", "span": "qa_outputs.weight"}
    head = one_head(heads, found, path)
    if head == "classification":
        num_labels = found["score.weight"][0] if found["score.weight"] else 0
        filled = frozenset({"classifier.bias"})
        return Content(replace(model, head="classification", num_labels=num_labels), filled)
    return Content(replace(model, head="span") if head == "span" else model)
