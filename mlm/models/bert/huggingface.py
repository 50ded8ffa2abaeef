"""BERT as `transformers` names and stores it, and as we do: model_type bert (layer norm behind the residual
sums) and megatron-bert (before attention and MLP).

Keys and their defaults: the documentation of BertConfig and MegatronBertConfig
(https://huggingface.co/docs/transformers/model_doc/bert, …/megatron-bert).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from mlm.checkpoint.huggingface.content import Content, Head, Ids, labels, one_head
from mlm.checkpoint.huggingface.keys import (
    EVERYWHERE,
    EXACT_GELU,
    GELU_NAMES,
    TANH_GELU,
    Keys,
    activation,
    read_keys,
    show,
)
from mlm.checkpoint.huggingface.names import Place, weight_and_bias
from mlm.checkpoint.native.format import JSON
from mlm.errors import UserError
from mlm.models.config import ModelConfig

BERT_PREFIX = "bert."
"""In the names of all classes but BertModel."""
BERT_TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""The output layer is the token table, with a bias of its own."""
BERT_BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)")
"""0, 1, 2, … and zeros, which versions before 4.31 stored."""

_ARCHITECTURES = {
    "language_model": "BertForPreTraining",
    "none": "BertModel",
    "classification": "BertForSequenceClassification",
    "span": "BertForQuestionAnswering",
}
_NORMS = {  # norm -> the tensors behind which ours are, of a layer
    "post": {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"},
    "pre": {"attention_norm": "attention.ln", "mlp_norm": "ln"},
}
_LAYER = {
    "attention.out": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_MASKED_LM = {
    "mlm_head.transform": "cls.predictions.transform.dense",
    "mlm_head.norm": "cls.predictions.transform.LayerNorm",
}
_POOLER, _ORDER = "pooler.dense", "cls.seq_relationship"


def architectures(norm: str) -> dict[str, str]:
    """head -> the class that has it."""
    return {head: name if norm == "post" else f"Megatron{name}" for head, name in _ARCHITECTURES.items()}


def bert_places(model: ModelConfig) -> Iterator[tuple[str, Place]]:
    """(our name, place) of every parameter of BERT, in the order of the model."""
    tables = {"token": "word", "position": "position"} | (
        {"token_type": "token_type"} if model.token_types else {}
    )
    for kind, theirs in tables.items():
        yield f"{kind}.weight", Place((f"embeddings.{theirs}_embeddings.weight",))
    if model.norm == "post":
        yield from weight_and_bias("embedding_norm", "embeddings.LayerNorm")
    for layer in range(model.num_layers):
        ours, there = f"layers.{layer}", f"encoder.layer.{layer}"
        qkv = [f"{there}.attention.self.{part}" for part in ("query", "key", "value")]
        yield from weight_and_bias(f"{ours}.attention.qkv", *qkv, num_heads=model.num_heads)
        for name, theirs in (_LAYER | _NORMS[model.norm]).items():
            yield from weight_and_bias(f"{ours}.{name}", f"{there}.{theirs}")
    if model.norm == "pre":
        yield from weight_and_bias("final_norm", "encoder.ln")
    if model.head != "span":
        yield from weight_and_bias("pooler", _POOLER)
    if model.head == "language_model":
        for name, theirs in _MASKED_LM.items():
            yield from weight_and_bias(name, theirs)
        yield "mlm_head.vocabulary.bias", Place(("cls.predictions.bias",))
        yield from weight_and_bias("sop_head", _ORDER)
    if model.head in ("classification", "span"):
        there = "classifier" if model.head == "classification" else "qa_outputs"
        yield from weight_and_bias("classifier", there)


def plain_bert_name(theirs: str) -> str:
    """A name without the base model's prefix, the weights of layer norm called as they are today: gamma and
    beta are TensorFlow's words, in files of 2018 and 2019."""
    name = theirs.removeprefix(BERT_PREFIX)
    return re.sub(
        r"(?<=LayerNorm\.)(gamma|beta)$", lambda old: {"gamma": "weight", "beta": "bias"}[old[1]], name
    )


def bert_from_huggingface(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Whole (unsplit) parameters of our BERT `model` from the state of the class of its head.

    Raises KeyError for a name that it does not have, or that is not there.
    """
    found = {plain_bert_name(theirs): value for theirs, value in state.items()}
    places = dict(bert_places(model))
    known = {name for place in places.values() for name in place.names}
    for name in found:
        if name not in known and name not in BERT_TIED and not BERT_BUFFERS.fullmatch(name):
            raise KeyError(f"{name!r} is not a parameter of {architectures(model.norm)[model.head]}")
    return {ours: place.to_ours([found[name] for name in place.names]) for ours, place in places.items()}


def _keys(vocabulary: int, width: int, layers: int, heads: int) -> Keys:
    """What is read, with the defaults of one of the two."""
    return Keys(
        one_way=EVERYWHERE
        | {
            "hidden_act": (*EXACT_GELU, *TANH_GELU),
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
        },
        sizes={
            "vocab_size": (vocabulary, 1 << 24),
            "hidden_size": (width, 1 << 20),
            "num_hidden_layers": (layers, 10_000),
            "num_attention_heads": (heads, 1 << 20),
            "intermediate_size": (4 * width, 1 << 24),
            "max_position_embeddings": (512, 1 << 24),
            "type_vocab_size": (2, 1 << 16),
        },
        numbers={
            "hidden_dropout_prob": (0.1, 0.0, 1.0),
            "attention_probs_dropout_prob": (0.1, 0.0, 1.0),
            "layer_norm_eps": (1e-12, 0.0, 1.0),
            "initializer_range": (0.02, 0.0, 1e3),
        },
        heads=("hidden_size", "num_attention_heads"),
    )


_KEYS = {"post": _keys(30522, 768, 12, 12), "pre": _keys(29056, 1024, 24, 16)}


def read_bert_config(said: Mapping[str, JSON], path: str) -> tuple[ModelConfig, list[str]]:
    """Our settings for a BertConfig or MegatronBertConfig, without a head, and notes on what is taken
    differently. Raises ConfigError."""
    is_megatron = said.get("model_type") == "megatron-bert"
    found = read_keys(said, _KEYS["pre" if is_megatron else "post"], path, "BERT")
    hidden, ffn = found["hidden_size"], found["intermediate_size"]
    notes = []
    last = said.get("classifier_dropout")
    if last is not None and last != found["hidden_dropout_prob"]:
        notes.append(
            f"classifier_dropout={show(last)} is not kept: model.hidden_dropout is one number for all, "
            f"hidden_dropout_prob={found['hidden_dropout_prob']} is taken"
        )
    model = ModelConfig(
        kind="bert",
        norm="pre" if is_megatron else "post",
        num_layers=found["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=found["num_attention_heads"],
        ffn_hidden_size=None if ffn == 4 * hidden else ffn,
        max_positions=found["max_position_embeddings"],
        vocab_size=found["vocab_size"],
        token_types=found["type_vocab_size"],
        activation=activation(found["hidden_act"]),
        hidden_dropout=float(found["hidden_dropout_prob"]),
        attention_dropout=float(found["attention_probs_dropout_prob"]),
        init_std=float(found["initializer_range"]),
        layer_norm_eps=float(found["layer_norm_eps"]),
        head="none",
    )
    return model, notes


def write_bert_config(model: ModelConfig, ids: Ids) -> dict[str, JSON]:
    """The config.json that the class of its head loads."""
    return {
        "architectures": [architectures(model.norm)[model.head]],
        "model_type": "bert" if model.norm == "post" else "megatron-bert",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn_size,
        "hidden_act": GELU_NAMES[model.activation],
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": model.token_types,
        "initializer_range": model.init_std,
        "layer_norm_eps": model.layer_norm_eps,
        "pad_token_id": ids.pad,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **(labels(model, ids.labels) if model.head == "classification" else {}),
    }


def bert_content(model: ModelConfig, found: Mapping[str, tuple[int, ...]], path: str) -> Content:
    """What a folder with tensors of these names and shapes is.

    BertForMaskedLM has neither pooler nor sentence-order head, BertModel perhaps no pooler: what is not there
    takes initial values. Raises UserError for two heads, and for one that is not ours.
    """
    heads: dict[Head, str] = {
        "language_model": "cls.predictions.transform.dense.weight",
        "classification": "classifier.weight",
        "span": "qa_outputs.weight",
    }
    head = one_head(heads, found, path)
    there = {name.rpartition(".")[0] for name in found}
    if head == "classification":
        if _POOLER not in there:
            raise UserError(
                f"{path}: holds a classifier and no {_POOLER}: a label for each token "
                f"(…BertForTokenClassification) is no head of ours. Save its base model, and name that folder"
            )
        shape = found["classifier.weight"]
        return Content(replace(model, head=head, num_labels=shape[0] if shape else 0))
    if head == "span":
        unused = frozenset(name for name in found if name.startswith(f"{_POOLER}."))
        note = f"left out: {_POOLER}, which {architectures(model.norm)['span']} has no use for"
        return Content(replace(model, head=head), left_out=unused, notes=(note,) if unused else ())
    wanted = {"pooler": _POOLER} | ({"sop_head": _ORDER} if head == "language_model" else {})
    missing = {ours: theirs for ours, theirs in wanted.items() if theirs not in there}
    notes = [
        f"no {theirs} is there: {ours} takes initial values, which training moves"
        for ours, theirs in missing.items()
    ]
    unused = frozenset(name for name in found if head is None and name.startswith(f"{_ORDER}."))
    if unused:
        notes.append(f"left out: {_ORDER}, as no masked-LM head is there")
    filled = frozenset(f"{ours}.{part}" for ours in missing for part in ("weight", "bias"))
    return Content(replace(model, head=head or "none"), filled, unused, tuple(notes))
