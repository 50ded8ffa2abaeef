"""A GPT-2 and a BERT of `transformers` in Megatron Core's names and order: for tests of the import.

Every row is picked from the formula of the layout; nothing of mlm is used. `llamas.write_torch_dist` writes
them.
"""

import argparse
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, MegatronBertConfig, MegatronBertForPreTraining

from tests.models import reference

VOCAB, POSITIONS, HIDDEN, LAYERS, HEADS = 61, 24, 32, 4, 4
WIDTH = HIDDEN // HEADS
PARTS = ("weight", "bias")
State = dict[str, Tensor]


@cache
def random_gpt2() -> GPT2LMHeadModel:
    sizes = {"vocab_size": VOCAB, "n_positions": POSITIONS, "n_embd": HIDDEN, "n_layer": LAYERS}
    return reference.random_gpt2(0.2, n_head=HEADS, **sizes).eval()


def random_bert(**settings: Any) -> MegatronBertForPreTraining:
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
    model: MegatronBertForPreTraining = reference.randomized(MegatronBertForPreTraining(config), 0.2).eval()
    return model


def arguments(**changes: Any) -> argparse.Namespace:
    """The settings of a run of GPT-2 or BERT, whose fused kernel is gelu's tanh form."""
    values = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": 4 * HIDDEN,
        "max_position_embeddings": POSITIONS,
        "layernorm_epsilon": 1e-5,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "init_method_std": 0.02,
        "openai_gelu": True,
        "bias_gelu_fusion": True,
        "make_vocab_size_divisible_by": 128,
    }
    return argparse.Namespace(**(values | changes))


def padded(table: Tensor, rows: int) -> Tensor:
    """Rows of tokens, then padding, which is not zero in real ones."""
    full = torch.full((rows, *table.shape[1:]), 7.0)
    full[:VOCAB] = table
    return full


def core_layer(norm1: str, qkv: State, out: str, norm2: str, up: str, down: str, state: State) -> State:
    """A layer in Megatron Core's names, its linear weights [out, in]; texts name modules of `state`."""
    # Rows of q, k and v, one after the other, in the order [head][q, k, v][column].
    numbers = torch.arange(3 * HIDDEN).view(3, HEADS, WIDTH)
    order, layer = numbers.transpose(0, 1).flatten(), State()
    for part in PARTS:
        layer |= {
            f"self_attention.linear_qkv.layer_norm_{part}": state[f"{norm1}.{part}"],
            f"self_attention.linear_qkv.{part}": qkv[part][order],
            f"self_attention.linear_proj.{part}": state[f"{out}.{part}"],
            f"mlp.linear_fc1.layer_norm_{part}": state[f"{norm2}.{part}"],
            f"mlp.linear_fc1.{part}": state[f"{up}.{part}"],
            f"mlp.linear_fc2.{part}": state[f"{down}.{part}"],
        }
    return layer


def stacked(layers: list[State], part: str) -> State:
    return {f"{part}.layers.{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}


def gpt2_state(model: GPT2LMHeadModel, rows: int = 64) -> State:
    state = {  # linear weights are [in, out] there
        name.removeprefix("transformer."): value.t() if ".c_" in name and value.ndim == 2 else value
        for name, value in model.state_dict().items()
    }
    layers = []
    for n in range(LAYERS):
        h, qkv = f"h.{n}", {part: state[f"h.{n}.attn.c_attn.{part}"] for part in PARTS}
        names = f"{h}.ln_1", qkv, f"{h}.attn.c_proj", f"{h}.ln_2", f"{h}.mlp.c_fc", f"{h}.mlp.c_proj"
        layers.append(core_layer(*names, state))
    return {
        "embedding.word_embeddings.weight": padded(state["wte.weight"], rows),
        "embedding.position_embeddings.weight": state["wpe.weight"],
        **{f"decoder.final_layernorm.{part}": state[f"ln_f.{part}"] for part in PARTS},
        **stacked(layers, "decoder"),
    }


def bert_state(model: MegatronBertForPreTraining, rows: int = 64, *, binary_head: bool = True) -> State:
    """`binary_head`: --bert-no-binary-head if not."""
    state, layers = model.state_dict(), []
    for n in range(LAYERS):
        h = f"bert.encoder.layer.{n}"
        parts = {
            part: [state[f"{h}.attention.self.{m}.{part}"] for m in ("query", "key", "value")]
            for part in PARTS
        }
        qkv = {part: torch.cat(values) for part, values in parts.items()}
        out, up, down = f"{h}.attention.output.dense", f"{h}.intermediate.dense", f"{h}.output.dense"
        layers.append(core_layer(f"{h}.attention.ln", qkv, out, f"{h}.ln", up, down, state))
    modules = {
        "encoder.final_layernorm": "bert.encoder.ln",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
        **(
            {"pooler.dense": "bert.pooler.dense", "binary_head": "cls.seq_relationship"}
            if binary_head
            else {}
        ),
    }
    embeddings = "bert.embeddings"
    types = {"embedding.tokentype_embeddings.weight": state[f"{embeddings}.token_type_embeddings.weight"]}
    return {
        "embedding.word_embeddings.weight": padded(state[f"{embeddings}.word_embeddings.weight"], rows),
        "embedding.position_embeddings.weight": state[f"{embeddings}.position_embeddings.weight"],
        **(types if binary_head else {}),
        **{f"{theirs}.{p}": state[f"{hf}.{p}"] for theirs, hf in modules.items() for p in PARTS},
        "output_layer.bias": padded(state["cls.predictions.bias"], rows),
        **stacked(layers, "encoder"),
    }
