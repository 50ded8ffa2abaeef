"""BERT as `transformers` stores it.

model_type is bert (layer norm after the residual sums) or megatron-bert (before attention and MLP). Keys of
config.json and their defaults: the documentation of BertConfig and MegatronBertConfig
(https://huggingface.co/docs/transformers/model_doc/bert, …/megatron-bert).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mlm.convert.huggingface import mapping as hf
from mlm.data.tokenizer import Tokenizer
from mlm.data.vocabulary_files import UNK
from mlm.models.backbone import Transformer
from mlm.models.bert.family import model_problem
from mlm.models.bert.model import BERT
from mlm.models.config import ModelConfig
from mlm.models.shape import is_tied
from mlm.util.errors import ConfigError, UserError

PREFIX = "bert."

_ARCHITECTURES = {
    "language_model": "BertForPreTraining",
    "none": "BertModel",
    "classification": "BertForSequenceClassification",
    "span": "BertForQuestionAnswering",
}
_NORMS = {  # norm -> modules of a layer
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


def architecture(model: ModelConfig) -> str:
    name = _ARCHITECTURES[model.head]
    return name if model.norm == "post" else f"Megatron{name}"


def locations(model: ModelConfig) -> Iterator[tuple[str, hf.Location]]:
    for ours, theirs in (("token", "word"), ("position", "position"), ("token_type", "token_type")):
        if ours != "token_type" or model.token_types:
            yield f"{ours}.weight", hf.Location((f"embeddings.{theirs}_embeddings.weight",))
    if model.norm == "post":
        yield from hf.weight_and_bias("embedding_norm", "embeddings.LayerNorm")
    for layer in range(model.num_layers):
        ours, stored = f"layers.{layer}", f"encoder.layer.{layer}"
        qkv = [f"{stored}.attention.self.{part}" for part in ("query", "key", "value")]
        yield from hf.weight_and_bias(f"{ours}.attention.qkv", *qkv, num_heads=model.num_heads)
        for name, theirs in (_LAYER | _NORMS[model.norm]).items():
            yield from hf.weight_and_bias(f"{ours}.{name}", f"{stored}.{theirs}")
    if model.norm == "pre":
        yield from hf.weight_and_bias("final_norm", "encoder.ln")
    if model.head != "span":
        yield from hf.weight_and_bias("pooler", _POOLER)
    if model.head == "language_model":
        for name, theirs in _MASKED_LM.items():
            yield from hf.weight_and_bias(name, theirs)
        yield "mlm_head.vocabulary.bias", hf.Location(("cls.predictions.bias",))
        yield from hf.weight_and_bias("sop_head", _ORDER)
    if model.head in ("classification", "span"):
        stored = "classifier" if model.head == "classification" else "qa_outputs"
        yield from hf.weight_and_bias("classifier", stored)


def plain_name(theirs: str) -> str:
    """Return a name without the base model's prefix, in today's spelling.

    gamma and beta are TensorFlow's words for weight and bias, in files of 2018 and 2019.
    """
    name = theirs.removeprefix(PREFIX)
    name = re.sub(r"(?<=LayerNorm\.)gamma$", "weight", name)
    return re.sub(r"(?<=LayerNorm\.)beta$", "bias", name)


def _keys(vocabulary: int, width: int, layers: int, heads: int) -> hf.ConfigKeys:
    """Keys of config.json with the defaults of one of the two model types."""
    return hf.ConfigKeys(
        activation="hidden_act",
        fixed=hf.UNSUPPORTED
        | {
            "hidden_act": (*hf.EXACT_GELU, *hf.TANH_GELU),
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "is_causal": (False,),
        },
        fields={
            "vocab_size": ("vocab_size", vocabulary),
            "hidden_size": ("hidden_size", width),
            "num_hidden_layers": ("num_layers", layers),
            "num_attention_heads": ("num_heads", heads),
            "intermediate_size": ("ffn_hidden_size", 4 * width),
            "max_position_embeddings": ("max_positions", 512),
            "type_vocab_size": ("token_types", 2),
            "hidden_dropout_prob": ("hidden_dropout", 0.1),
            "attention_probs_dropout_prob": ("attention_dropout", 0.1),
            "layer_norm_eps": ("layer_norm_eps", 1e-12),
            "initializer_range": ("init_std", 0.02),
        },
    )


_KEYS = {"post": _keys(30522, 768, 12, 12), "pre": _keys(29056, 1024, 24, 16)}


def read_config(config: Mapping[str, hf.JSON], path: str) -> tuple[ModelConfig, list[str]]:
    """Return our settings for a BertConfig or MegatronBertConfig, without a head, and notes on differences.

    Raises ConfigError.
    """
    norm: Literal["pre", "post"] = "pre" if config.get("model_type") == "megatron-bert" else "post"
    model, _ = _KEYS[norm].read(config, path, "BERT", kind="bert", norm=norm, head="none")
    if problem_of_model := model_problem(model):
        raise ConfigError([f"{path}: type_vocab_size: {problem_of_model}"])
    if model.ffn_hidden_size == 4 * model.hidden_size:
        model = replace(model, ffn_hidden_size=None)
    notes = []
    last = config.get("classifier_dropout")
    if last is not None and last != model.hidden_dropout:
        notes.append(
            f"classifier_dropout={hf.show(last)} is not kept: model.hidden_dropout is one number for all, "
            f"hidden_dropout_prob={model.hidden_dropout} is taken"
        )
    return model, notes


def write_config(model: ModelConfig, ids: hf.TokenIds) -> dict[str, hf.JSON]:
    return {
        **_KEYS[model.norm].write({**asdict(model), "ffn_hidden_size": model.ffn_size}, architecture(model)),
        "model_type": "bert" if model.norm == "post" else "megatron-bert",
        "pad_token_id": ids.pad,
        **(hf.label_entries(model, ids.labels) if model.head == "classification" else {}),
    }


def content(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: str) -> hf.FolderContent:
    """Return the model that these tensors make.

    BertForMaskedLM has neither pooler nor sentence-order head, BertModel perhaps no pooler: missing
    parameters take initial values. Raises UserError for two heads, and for an unsupported one.
    """
    heads: dict[hf.Head, str] = {
        "language_model": "cls.predictions.transform.dense.weight",
        "classification": "classifier.weight",
        "span": "qa_outputs.weight",
    }
    head = hf.one_head(heads, shapes, path)
    modules = {name.rpartition(".")[0] for name in shapes}
    if head == "classification":
        if _POOLER not in modules:
            raise UserError(
                f"{path}: holds a classifier and no {_POOLER}: a label for each token "
                f"(…BertForTokenClassification) is not supported. Save its base model, and name that folder"
            )
        shape = shapes["classifier.weight"]
        return hf.FolderContent(replace(model, head=head, num_labels=shape[0] if shape else 0))
    if head == "span":
        config = replace(model, head=head)
        unused = frozenset(name for name in shapes if name.startswith(f"{_POOLER}."))
        note = f"left out: {_POOLER}, which {architecture(config)} has no use for"
        return hf.FolderContent(config, unused=unused, notes=(hf.Note(note),) if unused else ())
    wanted = {"pooler": _POOLER} | ({"sop_head": _ORDER} if head == "language_model" else {})
    missing = {ours: theirs for ours, theirs in wanted.items() if theirs not in modules}
    notes = [
        hf.Note(f"no {theirs} is there: {ours} takes initial values, which training moves", about=ours)
        for ours, theirs in missing.items()
    ]
    unused = frozenset(name for name in shapes if head is None and name.startswith(f"{_ORDER}."))
    if unused:
        notes.append(hf.Note(f"left out: {_ORDER}, as no masked-LM head is there", about="sop_head"))
    filled = frozenset(f"{ours}.{part}" for ours in missing for part in ("weight", "bias"))
    return hf.FolderContent(replace(model, head=head or "none"), filled, unused, tuple(notes))


def problem(model: ModelConfig) -> str | None:
    if model.token_types:
        return None
    return (
        "its model.token_types=0, and transformers' BERTs have token types: train it with model.token_types=2"
    )


def special_tokens(tokenizer: Tokenizer, model: ModelConfig, ids: hf.TokenIds) -> dict[str, hf.JSON]:
    named = {name: getattr(tokenizer, f"{name}_id") for name in ("cls", "sep", "mask", "pad")}
    tokens = {f"{name}_token": tokenizer.decode([id]) for name, id in named.items() if id is not None}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return {**tokens, "unk_token": UNK, "model_input_names": inputs}


def our_outputs(stage: Transformer, y: Tensor, mask: Tensor) -> hf.Outputs:
    """Logits of both pretraining heads, or hidden and pooled states of a model without a head."""
    assert isinstance(stage, BERT)
    rows = y.transpose(0, 1)[mask]  # [R, H]
    pooled = stage.pool(y)
    if not is_tied(stage.config):
        return {"hidden states": rows, "pooled states": pooled[0]}
    return {"token logits": stage.token_logits(rows), "order logits": stage.sop_head(pooled)[0]}


def hf_outputs(theirs: Any, probe: hf.ProbeSamples, content: hf.FolderContent) -> hf.Outputs:
    types = {} if probe.token_types is None else {"token_type_ids": probe.token_types}
    output = theirs(probe.tokens, attention_mask=probe.mask.long(), **types)
    filled = {name.partition(".")[0] for name in content.filled}
    match content.config.head:
        case "classification":
            return {"logits": output.logits}
        case "span":
            return {"logits": torch.stack([output.start_logits, output.end_logits], -1)[probe.mask]}
        case "none":
            outputs = {"hidden states": output.last_hidden_state[probe.mask]}
            return outputs if "pooler" in filled else outputs | {"pooled states": output.pooler_output}
    outputs = {"token logits": output.prediction_logits[probe.mask]}
    if filled & {"pooler", "sop_head"}:  # the sentence-order head reads the pooler
        return outputs
    return outputs | {"order logits": output.seq_relationship_logits}


MAPPING = hf.HuggingFaceMapping(
    model_types=("bert", "megatron-bert"),
    architecture=architecture,
    prefix=PREFIX,
    head_prefixes=("cls.", "classifier.", "qa_outputs."),
    plain=plain_name,
    copies=lambda model: {  # the output layer is the token table, with a separate bias
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    # 0, 1, 2, … and zeros, stored by versions before 4.31
    ignored=re.compile(r"embeddings\.(position_ids|token_type_ids)"),
    read=read_config,
    content=content,
    write=write_config,
    locations=locations,
    problem=problem,
    special_tokens=special_tokens,
    our_outputs=our_outputs,
    hf_outputs=hf_outputs,
)
