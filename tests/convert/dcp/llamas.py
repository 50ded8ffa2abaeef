"""Writes a `transformers` Llama as Megatron Core's torch_dist and as torchtitan's DCP: for tests.

Every row is picked from the formula of the layout; nothing of mlm is used.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN, LAYERS, HEADS, KV, WIDTH, FFN, POSITIONS = 61, 32, 3, 4, 2, 8, 48, 32
PADDED = 64


def random_llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    values = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": WIDTH,
        "intermediate_size": FFN,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**(values | settings))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def core_state(model: LlamaForCausalLM, *, stacked: bool = True) -> dict[str, Tensor]:
    """Megatron Core's whole tensors, layers stacked in one tensor or numbered."""
    state = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    layers = [core_layer(state, f"layers.{n}.") for n in range(LAYERS)]
    if stacked:
        inner = {f"decoder.layers.{k}": torch.stack([layer[k] for layer in layers]) for k in layers[0]}
    else:
        inner = {f"decoder.layers.{n}.{k}": v for n, layer in enumerate(layers) for k, v in layer.items()}
    return {
        "embedding.word_embeddings.weight": padded(state["embed_tokens.weight"]),
        "output_layer.weight": padded(state["lm_head.weight"]),
        "decoder.final_layernorm.weight": state["norm.weight"],
        **inner,
    }


def padded(table: Tensor) -> Tensor:
    return torch.cat([table, torch.full((PADDED - VOCAB, HIDDEN), 7.0)])


def core_layer(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    q, k, v = (state[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv")
    rows = []
    for group in range(KV):
        each = HEADS // KV * WIDTH
        rows += [q[group * each : (group + 1) * each]]
        rows += [one[group * WIDTH : (group + 1) * WIDTH] for one in (k, v)]
    return {
        "self_attention.linear_qkv.layer_norm_weight": state[f"{prefix}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": torch.cat(rows),
        "self_attention.linear_proj.weight": state[f"{prefix}self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": state[f"{prefix}post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([state[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up")]),
        "mlp.linear_fc2.weight": state[f"{prefix}mlp.down_proj.weight"],
    }


def arguments(**changes: Any) -> argparse.Namespace:
    values = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "group_query_attention": True,
        "num_query_groups": KV,
        "kv_channels": WIDTH,
        "ffn_hidden_size": FFN,
        "max_position_embeddings": POSITIONS,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "vocab_size": VOCAB,
    }
    return argparse.Namespace(**(values | changes))


def write_torch_dist(folder: Path, state: dict[str, Tensor], args: argparse.Namespace | None = None) -> Path:
    """Write Megatron-LM's folder by torch alone; returns the iter folder."""
    step = folder / "iter_0000007"
    extra = {"decoder.layers.mlp.linear_fc1._extra_state/shard_0_3": None}
    extra |= {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3)}
    dcp.save(extra | state, checkpoint_id=step, no_dist=True)
    common = {"args": args or arguments(), "iteration": 7, "checkpoint_version": 3.0}
    torch.save(common, step / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (step / "metadata.json").write_text(json.dumps(backend))
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return step


def torchtitan_state(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """torchtitan's tensors: rows of queries and keys as Meta's Llama turns them, in neighbouring pairs."""
    state = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    order = [n for i in range(WIDTH // 2) for n in (i, i + WIDTH // 2)]
    out = {
        "tok_embeddings.weight": state["embed_tokens.weight"],
        "norm.weight": state["norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for n in range(LAYERS):
        for ours, theirs in TORCHTITAN.items():
            value = state[f"layers.{n}.{theirs}.weight"]
            if ours in ("attention.wq", "attention.wk"):
                value = torch.cat([head[order] for head in value.split(WIDTH)])
            out[f"layers.{n}.{ours}.weight"] = value
    return out


TORCHTITAN = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
