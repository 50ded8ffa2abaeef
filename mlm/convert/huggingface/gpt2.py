"""GPT-2 in `transformers`.

Keys of config.json and their defaults: the documentation of GPT2Config
(https://huggingface.co/docs/transformers/model_doc/gpt2).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from mlm.convert.huggingface import mapping as hf
from mlm.convert.locations import Location, weight_and_bias
from mlm.data.tokenizer import Tokenizer
from mlm.models.backbone import Transformer
from mlm.models.config import ModelConfig
from mlm.models.gpt2.model import GPT2
from mlm.parallel.cross_entropy import full_logits

PREFIX = "transformer."
ARCHITECTURES = {
    "language_model": "GPT2LMHeadModel",
    "none": "GPT2Model",
    "classification": "GPT2ForSequenceClassification",
    "span": "GPT2ForQuestionAnswering",
}
_LAYER = {  # ours -> (theirs, True if their weight is stored [in, out])
    "attention_norm": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.out": ("attn.c_proj", True),
    "mlp_norm": ("ln_2", False),
    "mlp.up": ("mlp.c_fc", True),
    "mlp.down": ("mlp.c_proj", True),
}
_KEYS = hf.ConfigKeys(
    activation="activation_function",
    fixed=hf.UNSUPPORTED
    | {
        "activation_function": (*hf.TANH_GELU, *hf.EXACT_GELU, *hf.RELU_SQUARED),
        "scale_attn_weights": (True,),
        "is_causal": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "sliding_window": (None,),  # the cache of `transformers` would take it
        "layer_types": (None,),
        # any reorder_and_upcast_attn: it chooses the precision and order of products, not the function
    },
    fields={
        "vocab_size": ("vocab_size", 50257),
        "n_positions": ("max_positions", 1024),
        "n_embd": ("hidden_size", 768),
        "n_layer": ("num_layers", 12),
        "n_head": ("num_heads", 12),
        "n_inner": ("ffn_hidden_size", None),
        "embd_pdrop": ("hidden_dropout", 0.1),
        "resid_pdrop": ("hidden_dropout", 0.1),
        "attn_pdrop": ("attention_dropout", 0.1),
        "layer_norm_epsilon": ("layer_norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
    },
)
_ALIASES = {  # other names that GPT2Config accepts, and takes where both are given
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}


def locations(model: ModelConfig) -> Iterator[tuple[str, Location]]:
    """Yield all locations; a classifier's bias has none: GPT2ForSequenceClassification has it as zero."""
    yield "token.weight", Location(("wte.weight",))
    yield "position.weight", Location(("wpe.weight",))
    for layer in range(model.num_layers):
        for module, (hf_module, transposed) in _LAYER.items():
            heads = model.num_heads if module == "attention.qkv" else None
            names = f"layers.{layer}.{module}", f"h.{layer}.{hf_module}"
            yield from weight_and_bias(*names, transposed=transposed, num_heads=heads)
    yield from weight_and_bias("final_norm", "ln_f")
    if model.head == "classification":
        yield "classifier.weight", Location(("score.weight",))
    if model.head == "span":
        yield from weight_and_bias("classifier", "qa_outputs")


def read_config(config: Mapping[str, hf.JSON], path: str) -> tuple[ModelConfig, list[str]]:
    """Return the settings for a GPT2Config, and notes on differences. Raises ConfigError."""
    config = dict(config) | {_ALIASES[k]: v for k, v in config.items() if k in _ALIASES}
    model, _ = _KEYS.read(config, path, "GPT-2")
    notes, dropout = [], config.get("embd_pdrop", 0.1)
    if dropout != model.hidden_dropout:
        notes.append(
            f"embd_pdrop={hf.show(dropout)} is not kept: model.hidden_dropout is one number for the "
            f"embeddings and the residual branches, resid_pdrop={model.hidden_dropout} is taken"
        )
    return model, notes


def write_config(model: ModelConfig, ids: hf.TokenIds) -> dict[str, hf.JSON]:
    return {
        **_KEYS.write(asdict(model), ARCHITECTURES[model.head]),
        "model_type": "gpt2",
        "bos_token_id": ids.eod,
        "eos_token_id": ids.eod,
        # its classifier reads the last token before this padding, so that one trained on eod has none
        **({"pad_token_id": ids.eod} if model.head == "classification" and not ids.ends_texts else {}),
        **({} if ids.pad is None else {"pad_token_id": ids.pad}),
        **(hf.label_entries(model, ids.labels) if model.head == "classification" else {}),
    }


def content(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: str) -> hf.FolderContent:
    """Return the model in a folder by its tensors.

    Without another head it is GPT2LMHeadModel, whose output layer is the token table. Raises UserError for
    two heads.
    """
    heads: dict[hf.Head, str] = {"classification": "score.weight", "span": "qa_outputs.weight"}
    head = hf.one_head(heads, shapes, path)
    if head == "classification":
        num_labels = shapes["score.weight"][0] if shapes["score.weight"] else 0
        config = replace(model, head=head, num_labels=num_labels)
        return hf.FolderContent(config, filled=frozenset({"classifier.bias"}))
    return hf.FolderContent(replace(model, head="span") if head == "span" else model)


def special_tokens(tokenizer: Tokenizer, model: ModelConfig, ids: hf.TokenIds) -> dict[str, hf.JSON]:
    """Return GPT-2's only special token in all its roles, and the padding."""
    eod = tokenizer.decode([tokenizer.eod_id])
    pads_with_eod = ids.pad is None and model.head == "classification" and not ids.ends_texts
    pad = tokenizer.eod_id if pads_with_eod else ids.pad
    padded = {} if pad is None else {"pad_token": tokenizer.decode([pad])}
    return {"bos_token": eod, "eos_token": eod, "unk_token": eod, **padded}


def native_outputs(stage: Transformer, y: Tensor, mask: Tensor) -> hf.Outputs:
    assert isinstance(stage, GPT2)
    rows = y.transpose(0, 1)[mask]  # [R, H]
    if stage.config.head != "language_model":
        return {"hidden states": rows}
    return {"logits": full_logits(rows, stage.vocabulary)}


def hf_outputs(hf_model: Any, probe: hf.ProbeSamples, content: hf.FolderContent) -> hf.Outputs:
    head = content.config.head
    if head == "classification":
        hf_model.config.pad_token_id = None  # a random token could be its padding: sample by sample, without
        samples = zip(probe.tokens, probe.lengths.tolist(), strict=True)
        return {"logits": torch.cat([hf_model(row[None, :length]).logits for row, length in samples])}
    output = hf_model(probe.tokens, attention_mask=probe.mask.long())
    if head == "span":
        return {"logits": torch.stack([output.start_logits, output.end_logits], -1)[probe.mask]}
    if head == "none":
        return {"hidden states": output.last_hidden_state[probe.mask]}
    return {"logits": output.logits[probe.mask]}


MAPPING = hf.HuggingFaceMapping(
    model_types=("gpt2",),
    architecture=lambda model: ARCHITECTURES[model.head],
    prefix=lambda model: PREFIX,
    head_prefixes=("score.", "qa_outputs."),
    plain=lambda name: name.removeprefix(PREFIX),
    copies=lambda model: {"lm_head.weight": "wte.weight"},
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),  # causal masks, stored by old versions
    read=read_config,
    content=content,
    write=write_config,
    locations=locations,
    heads_without_bias=frozenset({"classification"}),
    pads_with_special_token=True,  # the exported tokenizer would take a piece of words for padding
    special_tokens=special_tokens,
    native_outputs=native_outputs,
    hf_outputs=hf_outputs,
)
