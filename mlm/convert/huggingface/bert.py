"""BERT and its variants in `transformers`: rows of `ENCODERS`.

model_type is bert (layer norm after the residual sums), megatron-bert (before attention and MLP), roberta,
read from xlm-roberta and camembert too, or distilbert. Keys of config.json and their defaults: the
documentation of BertConfig, MegatronBertConfig, RobertaConfig and DistilBertConfig
(https://huggingface.co/docs/transformers/model_doc/bert, …/megatron-bert, …/roberta, …/distilbert).
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mlm.convert.huggingface import mapping as hf
from mlm.convert.locations import Location, weight_and_bias
from mlm.data.tokenizer import Tokenizer
from mlm.data.vocabulary_files import UNK
from mlm.models.backbone import Transformer
from mlm.models.bert.model import BERT, MaskedLanguageModel
from mlm.models.config import ModelConfig
from mlm.models.family import family_of, model_problem, option
from mlm.models.roberta.family import padding_problem
from mlm.models.shape import architecture_of, is_tied
from mlm.util.errors import ConfigError, UserError

GELUS = (*hf.EXACT_GELU, *hf.TANH_GELU)


def _keys(
    vocabulary: int, width: int, layers: int, heads: int, activations: tuple[str, ...] = GELUS
) -> hf.ConfigKeys:
    """Return keys of config.json with the defaults of a model type."""
    return hf.ConfigKeys(
        activation="hidden_act",
        fixed=hf.UNSUPPORTED
        | {
            "hidden_act": activations,
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


_DISTILBERT_EPS = 1e-12
_DISTILBERT_KEYS = hf.ConfigKeys(
    activation="activation",
    fixed=hf.UNSUPPORTED | {"activation": GELUS},
    fields={
        "vocab_size": ("vocab_size", 30522),
        "dim": ("hidden_size", 768),
        "n_layers": ("num_layers", 6),
        "n_heads": ("num_heads", 12),
        "hidden_dim": ("ffn_hidden_size", 4 * 768),
        "max_position_embeddings": ("max_positions", 512),
        "dropout": ("hidden_dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
        "initializer_range": ("init_std", 0.02),
    },
)
_BERT_LAYER = {
    "attention.out": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_POST_NORMS = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
_BERT_HEAD = {
    "mlm_head.transform": "cls.predictions.transform.dense",
    "mlm_head.norm": "cls.predictions.transform.LayerNorm",
    "sop_head": "cls.seq_relationship",
}


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Names and configuration of a model type in `transformers`; the defaults are BERT's."""

    classes: str = "Bert"
    """Beginning of its classes' names."""
    kind: str = "bert"
    norm: Literal["pre", "post"] = "post"
    prefix: str = "bert."
    keys: hf.ConfigKeys
    pretraining_class: str = "ForPreTraining"
    layers: str = "encoder.layer"
    qkv: tuple[str, str, str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    layer: Mapping[str, str] = field(default_factory=lambda: _BERT_LAYER | _POST_NORMS)
    """Modules of a layer -> modules of `transformers`."""
    head: Mapping[str, str] = field(default_factory=lambda: _BERT_HEAD)
    """Modules of the pretraining head -> modules of `transformers`."""
    bias: str = "cls.predictions.bias"
    """Bias of the masked-token head's output layer."""
    decoder: str = "cls.predictions.decoder"
    """Output layer of the masked-token head, whose weight is a copy of the token table."""
    pooler: str = "pooler.dense"
    """Pooler of a classifier."""
    classifier: str = "classifier"


ENCODERS = {
    "bert": Encoder(keys=_keys(30522, 768, 12, 12)),
    "megatron-bert": Encoder(
        classes="MegatronBert",
        norm="pre",
        keys=_keys(29056, 1024, 24, 16),
        layer=_BERT_LAYER | {"attention_norm": "attention.ln", "mlp_norm": "ln"},
    ),
    "roberta": Encoder(
        classes="Roberta",
        kind="roberta",
        prefix="roberta.",
        keys=_keys(50265, 768, 12, 12, hf.EXACT_GELU),  # its head has no other
        pretraining_class="ForMaskedLM",
        head={"mlm_head.transform": "lm_head.dense", "mlm_head.norm": "lm_head.layer_norm"},
        bias="lm_head.bias",
        decoder="lm_head.decoder",
        pooler="classifier.dense",
        classifier="classifier.out_proj",
    ),
    "distilbert": Encoder(
        classes="DistilBert",
        kind="roberta",
        prefix="distilbert.",
        keys=_DISTILBERT_KEYS,
        pretraining_class="ForMaskedLM",
        layers="transformer.layer",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        layer={
            "attention.out": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "mlp.up": "ffn.lin1",
            "mlp.down": "ffn.lin2",
            "mlp_norm": "output_layer_norm",
        },
        head={"mlm_head.transform": "vocab_transform", "mlm_head.norm": "vocab_layer_norm"},
        bias="vocab_projector.bias",
        decoder="vocab_projector",
        pooler="pre_classifier",
    ),
}
_SAME_AS_ROBERTA = ("xlm-roberta", "camembert")
_HEADS = {
    "none": "Model",
    "classification": "ForSequenceClassification",
    "span": "ForQuestionAnswering",
}


def model_type(model: ModelConfig) -> str:
    if family_of(model.kind).converts_as == "bert":
        return "bert" if model.norm == "post" else "megatron-bert"
    return "roberta" if model.token_types else "distilbert"


def architecture(model: ModelConfig) -> str:
    row = ENCODERS[model_type(model)]
    return row.classes + (row.pretraining_class if model.head == "language_model" else _HEADS[model.head])


def locations(model: ModelConfig) -> Iterator[tuple[str, Location]]:
    row = ENCODERS[model_type(model)]
    for name, hf_name in (("token", "word"), ("position", "position"), ("token_type", "token_type")):
        if name != "token_type" or model.token_types:
            yield f"{name}.weight", Location((f"embeddings.{hf_name}_embeddings.weight",))
    if model.norm == "post":
        yield from weight_and_bias("embedding_norm", "embeddings.LayerNorm")
    for number in range(model.num_layers):
        layer, hf_layer = f"layers.{number}", f"{row.layers}.{number}"
        qkv = [f"{hf_layer}.{part}" for part in row.qkv]
        yield from weight_and_bias(f"{layer}.attention.qkv", *qkv, num_heads=model.num_heads)
        for name, hf_name in row.layer.items():
            yield from weight_and_bias(f"{layer}.{name}", f"{hf_layer}.{hf_name}")
    if model.norm == "pre":
        yield from weight_and_bias("final_norm", "encoder.ln")
    if model.head == "classification" or (model.head != "span" and row.kind == "bert"):
        yield from weight_and_bias("pooler", row.pooler)
    if model.head == "language_model":
        for name, hf_name in row.head.items():
            yield from weight_and_bias(name, hf_name)
        yield "mlm_head.vocabulary.bias", Location((row.bias,))
    if model.head in ("classification", "span"):
        hf_head = row.classifier if model.head == "classification" else "qa_outputs"
        yield from weight_and_bias("classifier", hf_head)


def plain_name(stored_name: str) -> str:
    """Return a name without the base model's prefix, in today's spelling.

    gamma and beta are weight and bias in files of 2018 and 2019, converted from TensorFlow.
    """
    name = re.sub("^(bert|roberta|distilbert)[.]", "", stored_name)
    name = re.sub(r"(?<=LayerNorm\.)gamma$", "weight", name)
    return re.sub(r"(?<=LayerNorm\.)beta$", "bias", name)


def renamings(names: Collection[str]) -> Mapping[str, str]:
    """Return RobertaForSequenceClassification's names for RobertaForMultipleChoice's."""
    if {"roberta.pooler.dense.weight", "classifier.weight"} <= {*names}:
        return {r"^classifier\.": "classifier.out_proj.", r"^roberta\.pooler\.dense\.": "classifier.dense."}
    return {}


def read_config(config: Mapping[str, hf.JSON], path: str) -> tuple[ModelConfig, list[str]]:
    """Return the settings for a configuration of ENCODERS, without a head, and notes on differences.

    Raises ConfigError.
    """
    kind, notes = str(config.get("model_type", "bert")), list[str]()
    if kind in _SAME_AS_ROBERTA:
        notes.append(f"model_type={kind} is read, and exported, as roberta, which computes the same")
        kind = "roberta"
    row = ENCODERS[kind]
    settings: dict[str, Any] = {"kind": row.kind, "norm": row.norm, "head": "none"}
    if kind == "distilbert":
        settings |= {"layer_norm_eps": _DISTILBERT_EPS, "options": {"pooler_activation": "relu"}}
    model, _ = row.keys.read(config, path, row.classes, **settings)
    if kind == "roberta":  # its table of positions begins after the id of padding
        pad = config.get("pad_token_id", 1)
        if type(pad) is not int or not 0 <= pad < model.max_positions - 1:
            reason = f"positions begin after it, and max_position_embeddings={model.max_positions}"
            raise ConfigError([f"{path}: pad_token_id={hf.show(pad)} must be a token's id: {reason}"])
        positions = model.max_positions - pad - 1
        model = replace(model, max_positions=positions, options={"position_offset": pad + 1})
    if problem_of_model := model_problem(model):
        raise ConfigError([f"{path}: type_vocab_size: {problem_of_model}"])
    if model.ffn_hidden_size == 4 * model.hidden_size:
        model = replace(model, ffn_hidden_size=None)
    dropout = config.get("classifier_dropout")
    if dropout is not None and dropout != model.hidden_dropout:
        notes.append(
            f"classifier_dropout={hf.show(dropout)} is not kept: model.hidden_dropout is one number for all, "
            f"hidden_dropout_prob={model.hidden_dropout} is taken"
        )
    return model, notes


def write_config(model: ModelConfig, ids: hf.TokenIds) -> dict[str, hf.JSON]:
    kind = model_type(model)
    offset = architecture_of(model).position_offset
    values = {
        **asdict(model),
        "ffn_hidden_size": model.ffn_size,
        "max_positions": model.max_positions + offset,
    }
    end_ids = {"bos_token_id": ids.bos, "eos_token_id": ids.eod}
    return {
        **ENCODERS[kind].keys.write(values, architecture(model)),
        "model_type": kind,
        "pad_token_id": offset - 1 if offset else ids.pad,
        **({name: id for name, id in end_ids.items() if id is not None} if kind == "roberta" else {}),
        **(hf.label_entries(model, ids.labels) if model.head == "classification" else {}),
    }


def content(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: str) -> hf.FolderContent:
    """Return the model in a folder by its tensors.

    BertForMaskedLM has neither pooler nor sentence-order head, BertModel may lack the pooler: missing
    parameters take initial values. Raises UserError for two heads, and for an unsupported one.
    """
    row = ENCODERS[model_type(model)]
    heads: dict[hf.Head, str] = {
        "language_model": f"{row.head['mlm_head.transform']}.weight",
        "classification": f"{row.classifier}.weight",
        "span": "qa_outputs.weight",
    }
    head = hf.one_head(heads, shapes, path)
    modules = {name.rpartition(".")[0] for name in shapes}
    labels_tokens = head is None and "classifier" in modules
    if labels_tokens or (head == "classification" and row.pooler not in modules):
        raise UserError(
            f"{path}: holds a classifier and no {row.pooler}: a label for each token "
            f"(…ForTokenClassification) is not supported. Save its base model, and name that folder"
        )
    if head == "classification":
        shape = shapes[heads[head]]
        return hf.FolderContent(replace(model, head=head, num_labels=shape[0] if shape else 0))
    if head == "span" or row.kind == "roberta":
        config = replace(model, head=head or "none")
        unused = frozenset(name for name in shapes if name.startswith("pooler."))
        note = f"left out: pooler.dense, which {architecture(config)} has no use for"
        if head is None:
            note = "left out: pooler.dense, which pretraining does not train"
        return hf.FolderContent(config, unused=unused, notes=(hf.Note(note),) if unused else ())
    order = row.head["sop_head"]
    required = {"pooler": row.pooler} | ({"sop_head": order} if head == "language_model" else {})
    missing = {module: hf_module for module, hf_module in required.items() if hf_module not in modules}
    notes = [
        hf.Note(f"no {hf_module} is there: {module} takes initial values, which training moves", about=module)
        for module, hf_module in missing.items()
    ]
    unused = frozenset(name for name in shapes if head is None and name.startswith(f"{order}."))
    if unused:
        notes.append(hf.Note(f"left out: {order}, as no masked-LM head is there", about="sop_head"))
    filled = frozenset(f"{module}.{part}" for module in missing for part in ("weight", "bias"))
    return hf.FolderContent(replace(model, head=head or "none"), filled, unused, tuple(notes))


def problem(model: ModelConfig, tokenizer: Tokenizer | None = None) -> str | None:
    kind, has_pairs = model_type(model), family_of(model.kind).converts_as == "bert"
    if has_pairs:
        if model.token_types:
            return None
        return (
            "its model.token_types=0, and transformers' BERTs have token types: train it with "
            "model.token_types=2"
        )
    offset = architecture_of(model).position_offset
    fixed: dict[str, tuple[object, object]] = {"model.norm": (model.norm, "post")}
    if kind == "distilbert":
        fixed |= {
            "model.layer_norm_eps": (model.layer_norm_eps, _DISTILBERT_EPS),
            "model.options.position_offset": (offset, 0),
        }
    else:
        fixed |= {"model.activation": (model.activation, "gelu")}
    if model.head == "classification":
        pooler = "relu" if kind == "distilbert" else "tanh"
        fixed |= {"model.options.pooler_activation": (option(model, "pooler_activation"), pooler)}
    for key, (value, expected) in fixed.items():
        if value != expected:
            return f"its {key}={value}, and transformers' {ENCODERS[kind].classes} has {expected}"
    if kind == "roberta" and not offset:
        return (
            "its model.options.position_offset=0, and positions of transformers' RoBERTa begin after the id "
            "of padding: train it with model.options.position_offset=2, or with model.token_types=0"
        )
    if tokenizer is not None and (padding := padding_problem(model, tokenizer)):
        return str(padding)
    return None


def special_tokens(tokenizer: Tokenizer, model: ModelConfig, ids: hf.TokenIds) -> dict[str, hf.JSON]:
    ids_by_role = {name: getattr(tokenizer, f"{name}_id") for name in ("cls", "sep", "mask", "pad")}
    tokens = {f"{name}_token": tokenizer.decode([id]) for name, id in ids_by_role.items() if id is not None}
    types = ["token_type_ids"] if model.token_types > 1 else []
    unknown = {"unk_token": UNK} if UNK in tokenizer else {}
    return {**tokens, **unknown, "model_input_names": ["input_ids", *types, "attention_mask"]}


def native_outputs(stage: Transformer, y: Tensor, mask: Tensor) -> hf.Outputs:
    """Return logits of the pretraining heads; without a head hidden states, and a BERT's pooled states."""
    assert isinstance(stage, MaskedLanguageModel)
    rows = y.transpose(0, 1)[mask]  # [R, H]
    pooled = stage.pool(y) if isinstance(stage, BERT) else None
    if not is_tied(stage.config):
        return {"hidden states": rows} | ({} if pooled is None else {"pooled states": pooled[0]})
    outputs = {"token logits": stage.token_logits(rows)}
    if isinstance(stage, BERT) and pooled is not None:
        outputs["order logits"] = stage.sop_head(pooled)[0]
    return outputs


def hf_outputs(hf_model: Any, probe: hf.ProbeSamples, content: hf.FolderContent) -> hf.Outputs:
    inputs = {} if probe.token_types is None else {"token_type_ids": probe.token_types}
    has_pairs = family_of(content.config.kind).converts_as == "bert"
    if offset := architecture_of(content.config).position_offset:  # random tokens hold ids of padding, too
        inputs["position_ids"] = (torch.arange(probe.tokens.shape[1]) + offset).expand_as(probe.tokens)
    output = hf_model(probe.tokens, attention_mask=probe.mask.long(), **inputs)
    filled = {name.partition(".")[0] for name in content.filled}
    match content.config.head:
        case "classification":
            return {"logits": output.logits}
        case "span":
            return {"logits": torch.stack([output.start_logits, output.end_logits], -1)[probe.mask]}
        case "none":
            outputs = {"hidden states": output.last_hidden_state[probe.mask]}
            has_pooler = has_pairs and "pooler" not in filled
            return outputs | {"pooled states": output.pooler_output} if has_pooler else outputs
    outputs = {"token logits": (output.prediction_logits if has_pairs else output.logits)[probe.mask]}
    if not has_pairs or filled & {"pooler", "sop_head"}:  # the sentence-order head reads the pooler
        return outputs
    return outputs | {"order logits": output.seq_relationship_logits}


def copies(model: ModelConfig) -> Mapping[str, str]:
    """Return the copies of the token table and bias in the output layer."""
    row = ENCODERS[model_type(model)]
    bias = {f"{row.decoder}.bias": row.bias} if row.bias != f"{row.decoder}.bias" else {}
    return {f"{row.decoder}.weight": "embeddings.word_embeddings.weight", **bias}


MAPPING = hf.HuggingFaceMapping(
    model_types=(*ENCODERS, *_SAME_AS_ROBERTA),
    architecture=architecture,
    prefix=lambda model: ENCODERS[model_type(model)].prefix,
    head_prefixes=("cls.", "lm_head.", "vocab_", "pre_classifier.", "classifier.", "qa_outputs."),
    plain=plain_name,
    copies=copies,
    renamings=renamings,
    # 0, 1, 2, … and zeros, stored by versions before 4.31
    ignored=re.compile(r"embeddings\.(position_ids|token_type_ids)"),
    read=read_config,
    content=content,
    write=write_config,
    locations=locations,
    problem=problem,
    special_tokens=special_tokens,
    native_outputs=native_outputs,
    hf_outputs=hf_outputs,
)
