"""Weights of `transformers`' GPT2LMHeadModel in this project's names and order.

Works on plain dictionaries of tensors: neither library's model is built here.
"""

import re
from collections.abc import Mapping

from torch import Tensor

_GPT2_LAYER = {  # theirs -> (ours, whether their weight is stored [in, out])
    "ln_1": ("attention_norm", False),
    "attn.c_attn": ("attention.qkv", True),
    "attn.c_proj": ("attention.out", True),
    "ln_2": ("mlp_norm", False),
    "mlp.c_fc": ("mlp.up", True),
    "mlp.c_proj": ("mlp.down", True),
}
_GPT2_OUTSIDE = {
    "wte.weight": "token.weight",
    "wpe.weight": "position.weight",
    "ln_f.weight": "final_norm.weight",
    "ln_f.bias": "final_norm.bias",
}


def gpt2_from_huggingface(state: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """Whole (unsplit) parameters of `mlm.models.gpt2.GPT2` from a GPT2LMHeadModel's or GPT2Model's state.

    Their linear weights are stored [in, out] and their fused qkv is [q | k | v], each by head; ours are
    [out, in] and [head][q, k, v]. Raises KeyError for a name that GPT-2 does not have.
    """
    out: dict[str, Tensor] = {}
    for theirs, value in state.items():
        name = theirs.removeprefix("transformer.")
        if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # tied to wte; causal masks of old versions
        if name in _GPT2_OUTSIDE:
            out[_GPT2_OUTSIDE[name]] = value
            continue
        match = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name)
        if match is None or match[2] not in _GPT2_LAYER:
            raise KeyError(f"{theirs!r} is not a parameter of GPT-2")
        ours, transposed = _GPT2_LAYER[match[2]]
        if transposed and match[3] == "weight":
            value = value.t()
        if ours == "attention.qkv":
            value = _qkv_by_head(value, num_heads)
        out[f"layers.{match[1]}.{ours}.{match[3]}"] = value
    return out


def _qkv_by_head(value: Tensor, num_heads: int) -> Tensor:
    """[3 * N * D, …] ordered [q | k | v][head] -> ordered [head][q, k, v]."""
    parts = value.unflatten(0, (3, num_heads, -1))  # [3, N, D, …]
    return parts.transpose(0, 1).flatten(0, 2)
