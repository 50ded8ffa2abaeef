"""Megatron-LM's names of the parameters of GPT-2 and BERT, and ours.

Three generations are read: `transformer` and `attention` (2019 to 2021), `encoder` and `self_attention` (2021
to 2024), and Megatron Core's `decoder.layers.0.self_attention.linear_qkv` in the same files (of BERT
`encoder.layers.0…`). Source: NVIDIA/Megatron-LM, language_model.py, transformer.py and bert_model.py of those
years, core/models/gpt, core/models/bert, core/transformer.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.megatron.files import shown
from mlm.errors import CorruptFileError, UserError

HEAD = "head.weight"
"""The last stage's copy of the token table. Not a name of ours: it is compared and left out."""

_OUTSIDE = {
    r"embedding\.word_embeddings\.weight": "token.weight",
    r"(?:embedding\.)?position_embeddings\.weight": "position.weight",
    r"(?:transformer|encoder|decoder)\.final_(?:layernorm|norm)\.(weight|bias)": "final_norm.{}",
    r"word_embeddings_for_head\.weight|output_layer\.weight": HEAD,
}
_BERT = {
    r"(?:embedding\.)?tokentype_embeddings\.weight": "token_type.weight",
    r"pooler\.dense\.(weight|bias)": "pooler.{}",
    r"lm_head\.dense\.(weight|bias)": "mlm_head.transform.{}",
    r"lm_head\.(?:layernorm|norm|layer_norm)\.(weight|bias)": "mlm_head.norm.{}",
    r"lm_head\.bias|output_layer\.bias": "mlm_head.vocabulary.bias",
    r"binary_head\.(weight|bias)": "sop_head.{}",
}
_LAYER = {
    r"input_(?:layernorm|norm)\.(weight|bias)": "attention_norm.{}",
    r"self_attention\.linear_qkv\.layer_norm_(weight|bias)": "attention_norm.{}",
    r"(?:self_)?attention\.(?:query_key_value|linear_qkv)\.(weight|bias)": "attention.qkv.{}",
    r"(?:self_)?attention\.(?:dense|linear_proj)\.(weight|bias)": "attention.out.{}",
    r"(?:post_attention_(?:layernorm|norm)|pre_mlp_layernorm)\.(weight|bias)": "mlp_norm.{}",
    r"mlp\.linear_fc1\.layer_norm_(weight|bias)": "mlp_norm.{}",
    r"mlp\.(?:dense_h_to_4h|linear_fc1)\.(weight|bias)": "mlp.up.{}",
    r"mlp\.(?:dense_4h_to_h|linear_fc2)\.(weight|bias)": "mlp.down.{}",
}
_IN_LAYER = re.compile(r"(?:transformer|encoder|decoder)\.layers\.(\d{1,6})\.(.+)")
_TP_DIMS = {
    **{"token": 0, "head": 0, "mlm_head.vocabulary": 0},
    **{"attention.qkv": 0, "mlp.up": 0, "attention.out": 1, "mlp.down": 1},
}
"""Dims that tensor parallelism cuts; the bias of a layer cut along dim 1 is replicated."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_DEPTH, _MAX_NODES = 8, 1 << 17  # of the dictionaries in a file; they may hold themselves


def is_bert(names: Iterable[str]) -> bool:
    """Whether our names of parameters are those of a BERT: its masked-LM head is always there."""
    return any(name.startswith("mlm_head.") for name in names)


def tp_dim(name: str) -> int | None:
    """The dim of a parameter that tensor-parallel ranks share out; None where each holds all of it."""
    module, _, kind = re.sub(r"^layers\.\d+\.", "", name).rpartition(".")
    dim = _TP_DIMS.get(module)
    return None if dim == 1 and kind == "bias" else dim


def our_names(path: Path, chunk: Any, first_layer: int) -> tuple[dict[str, Tensor], int]:
    """The tensors of one model part under our names, and how many layers it has."""
    named: dict[str, Tensor] = {}
    layers: set[int] = set()
    for theirs, value in _flatten(path, chunk):
        short = theirs.removeprefix("language_model.")
        if short.endswith("_extra_state"):
            continue  # Transformer Engine's, of FP8 training
        if in_layer := _IN_LAYER.fullmatch(short):
            number = int(in_layer[1])
            layers.add(number)
            ours = _translate(_LAYER, in_layer[2], f"layers.{first_layer + number}.")
        else:
            ours = _translate(_OUTSIDE | _BERT, short)
        if ours is None or ours in named:
            raise UserError(
                f"{path}: {shown(theirs)} is no part of GPT-2 or BERT as mlm has them: only these are "
                f"imported"
            )
        named[ours] = _plain(path, theirs, value)
    if layers != set(range(len(layers))):
        raise CorruptFileError(f"{path}: its layers are {sorted(layers)[:8]}, not 0, 1, 2, …: copy it again")
    return named, len(layers)


def _flatten(path: Path, chunk: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of a dictionary of dictionaries, in order."""
    if not isinstance(chunk, dict):
        raise CorruptFileError(f"{path}: its model is no dictionary: copy it again")
    open_nodes: list[tuple[str, int, Any]] = [("", 0, chunk)]
    visited = 0
    while open_nodes:
        prefix, depth, node = open_nodes.pop()
        visited += 1
        if isinstance(node, dict):
            too_many = depth > _MAX_DEPTH or visited > _MAX_NODES
            if too_many or not all(type(key) is str for key in node):
                raise CorruptFileError(
                    f"{path}: {shown(prefix) or 'model'} is no dictionary of names: copy it again"
                )
            open_nodes += [(f"{prefix}{key}.", depth + 1, value) for key, value in reversed(node.items())]
        else:
            yield prefix.removesuffix("."), node


def _translate(table: Mapping[str, str], theirs: str, prefix: str = "") -> str | None:
    for pattern, ours in table.items():
        if match := re.fullmatch(pattern, theirs):
            return prefix + ours.format(*match.groups())
    return None


def _plain(path: Path, name: str, value: Any) -> Tensor:
    """A tensor whose elements are all in the file: strides could make a few bytes a tensor of any size."""
    if (
        not isinstance(value, Tensor)
        or type(value) not in (Tensor, torch.nn.Parameter)
        or value.layout is not torch.strided
        or value.device.type != "cpu"
        or value.dtype not in _DTYPES
        or not value.is_contiguous()
        or not 1 <= value.ndim <= 2
        or not value.numel()
    ):
        raise CorruptFileError(
            f"{path}: {shown(name)} is not a plain tensor of floating-point numbers: copy it again"
        )
    return value.detach()
