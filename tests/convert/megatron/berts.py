"""Writes a `transformers` MegatronBert as Megatron-LM lays BERT out: for tests of the import.

What BERT has besides GPT-2's layers is laid out here, by the rules of bert_model.py and language_model.py;
the layers by written.py, which receives them under the names of GPT-2.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MegatronBertConfig, MegatronBertForPreTraining

from tests.convert.megatron.written import (
    FILE,
    HEADS,
    HIDDEN,
    LAYERS,
    POSITIONS,
    VOCAB,
    Layout,
    arguments,
    layer_part,
    save,
)

LAYER_NAMES = {
    "ln_1": "attention.ln",
    "attn.c_proj": "attention.output.dense",
    "ln_2": "ln",
    "mlp.c_fc": "intermediate.dense",
    "mlp.c_proj": "output.dense",
}


def random_bert(**settings: Any) -> MegatronBertForPreTraining:
    """transformers' model, every weight, bias and norm of it random."""
    torch.manual_seed(0)
    config = MegatronBertConfig(
        vocab_size=VOCAB,
        max_position_embeddings=POSITIONS,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        layer_norm_eps=1e-5,
        **({"hidden_act": "gelu_new"} | settings),
    )
    model = MegatronBertForPreTraining(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def write_bert(
    root: Path, model: MegatronBertForPreTraining, layout: Layout, *, binary_head: bool = True
) -> Path:
    """Write `root/mp_rank_…/model_optim_rng.pt`; returns `root`. `binary_head`: --bert-no-binary-head if
    not."""
    layout = replace(layout, args={"openai_gelu": True, "bert_binary_head": binary_head} | dict(layout.args))
    for t in range(layout.tp):
        for p in range(layout.pp):
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if layout.pp > 1 else "")
            (root / name).mkdir(parents=True)
            parts = [bert_part(model, layout, t, v * layout.pp + p, binary_head) for v in range(layout.vp)]
            content: dict[str, Any] = {"args": arguments(layout), "checkpoint_version": layout.version}
            content |= (
                {"model": parts[0]} if layout.vp == 1 else {f"model{v}": x for v, x in enumerate(parts)}
            )
            save(root / name / FILE, content)
    return root


def as_gpt2_layers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layers under the names, and in the order, of a GPT-2: linear weights [in, out], qkv in one."""
    out = {}
    for n in range(LAYERS):
        theirs, there = f"bert.encoder.layer.{n}", f"transformer.h.{n}"
        for kind in ("weight", "bias"):
            for gpt2, bert in LAYER_NAMES.items():
                value = state[f"{theirs}.{bert}.{kind}"]
                out[f"{there}.{gpt2}.{kind}"] = value.t() if value.ndim == 2 else value
            qkv = [state[f"{theirs}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            out[f"{there}.attn.c_attn.{kind}"] = torch.cat([value.t() for value in qkv], -1)
    return out


def bert_part(
    model: MegatronBertForPreTraining, layout: Layout, t: int, stage: int, binary_head: bool
) -> dict[str, Any]:
    """The tensors of one stage on tensor rank t, named as in `layout.names`."""
    state = {name: value.to(layout.dtype) for name, value in model.state_dict().items()}
    stages = layout.pp * layout.vp
    each, first, last = LAYERS // stages, stage == 0, stage == stages - 1
    table = torch.full((layout.rows, HIDDEN), 7.0, dtype=layout.dtype)
    table[:VOCAB] = state["bert.embeddings.word_embeddings.weight"]
    bias = torch.full((layout.rows,), 7.0, dtype=layout.dtype)
    bias[:VOCAB] = state["cls.predictions.bias"]
    mine, my_bias = table.chunk(layout.tp)[t].clone(), bias.chunk(layout.tp)[t].clone()
    inner: dict[str, Any] = {}
    for local in range(each):
        inner |= layer_part(as_gpt2_layers(state), layout, t, local, stage * each + local)
    both = ("weight", "bias")
    if last:
        inner |= {f"final_layernorm.{kind}": state[f"bert.encoder.ln.{kind}"] for kind in both}
    embedding = {"word_embeddings": {"weight": mine}}
    embedding["position_embeddings"] = {"weight": state["bert.embeddings.position_embeddings.weight"]}
    if binary_head:
        embedding["tokentype_embeddings"] = {"weight": state["bert.embeddings.token_type_embeddings.weight"]}
    transform = {kind: state[f"cls.predictions.transform.dense.{kind}"] for kind in both}
    norm = {kind: state[f"cls.predictions.transform.LayerNorm.{kind}"] for kind in both}
    pooler = {"dense": {kind: state[f"bert.pooler.dense.{kind}"] for kind in both}}
    order = {kind: state[f"cls.seq_relationship.{kind}"] for kind in both}
    heads = {"pooler": pooler, "binary_head": order} if binary_head else {}
    if layout.names == "core":
        out: dict[str, Any] = {"encoder": inner} | ({"embedding": embedding} if first else {})
        if last:
            out |= {
                "lm_head": {"dense": transform, "layer_norm": norm},
                "output_layer": {"bias": my_bias},
            } | heads
            if not first:
                out["output_layer"]["weight"] = mine
        return out
    language_model: dict[str, Any] = {"embedding": embedding} if first else {}
    language_model["transformer" if layout.names == "transformer" else "encoder"] = inner
    out = {"language_model": language_model}
    if last:
        name = "norm" if layout.names == "norm" else "layernorm"
        out["lm_head"] = {"dense": transform, name: norm, "bias": my_bias}
        if binary_head:
            language_model["pooler"] = pooler
            out["binary_head"] = order
        if not first:
            out["word_embeddings_for_head"] = {"weight": mine}
    return out
