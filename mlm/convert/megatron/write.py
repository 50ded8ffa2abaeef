"""Export of models to Megatron Core: names, order of rows, arguments, and files.

Names and arguments are Megatron-LM's with its defaults and Transformer Engine. The token table is padded with
zeros, as in Megatron.
"""

import io
import json
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import row_blocks
from mlm.checkpoint.native.slices import Read, Region
from mlm.checkpoint.parameters import parameters
from mlm.convert.dcp.writer import DCPTensor
from mlm.convert.locations import ForeignTensor, foreign_tensors
from mlm.convert.megatron.distributed import COMMON
from mlm.convert.megatron.mapping import TABLES, THROUGH_HF, MegatronMapping
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.models.config import ModelConfig
from mlm.models.shape import architecture_of
from mlm.util.errors import UserError
from mlm.util.files import write_atomic

RELEASE = "release"
"""Name of an iteration that Megatron-LM loads without optimizer state."""


def core_mapping(model: ModelConfig) -> MegatronMapping:
    """Return names and arguments of the family. Raises UserError if Megatron has no such model."""
    mapping = MAPPINGS.get(model.kind)
    if mapping is None:
        raise UserError(f"model.kind={model.kind}: Megatron has no such model")
    if model.head != "language_model":
        raise UserError(f"model.head={model.head}: Megatron has the heads of pretraining alone")
    if experts := architecture_of(model).experts:
        raise UserError(f"model.options.num_experts={experts}: {THROUGH_HF}")
    if problem := mapping.problem(model):
        raise UserError(f"Megatron Core has no such model: {problem}")
    return mapping


def core_tensors(model: ModelConfig, load: Read, dtype: torch.dtype) -> tuple[dict[str, DCPTensor], Read]:
    """Return Megatron Core's tensors for a DCP folder, and a function that computes their regions.

    The layers are one tensor, with the layer as first dim and an item for each. `load` returns parameters.
    """
    layers = dict[str, list[ForeignTensor]]()
    for name, tensor in foreign_tensors(core_mapping(model).locations(model), parameters(model)).items():
        layers.setdefault(re.sub(r"(?<=\.layers)\.\d+", "", name), []).append(tensor)
    tensors = dict[str, DCPTensor]()
    for key, (first, *_) in layers.items():
        shape = (model.padded_vocab_size(1), *first.shape[1:]) if key in TABLES else first.shape
        regions = [Region.full(shape)]
        if ".layers." in key:
            regions = [Region((n, *(0 for _ in shape)), (1, *shape)) for n in range(len(layers[key]))]
            shape = (len(regions), *shape)
        tensors[key] = DCPTensor(shape, dtype, tuple(regions))

    def read_core(key: str, region: Region) -> Tensor:
        if key not in TABLES:
            tensor = layers[key][region.offset[0] if ".layers." in key else 0]
            return tensor.compute(load).to(dtype).reshape(region.size)
        padded = torch.zeros(region.size, dtype=dtype)
        parameter, shape, _ = layers[key][0].sources[0]
        for rows in row_blocks(shape, 4):  # not two tables in memory
            padded[rows.within(region)] = load(parameter, rows)
        return padded

    return tensors, read_core


def write_common(folder: Path, model: ModelConfig, token_ids: Mapping[str, int | list[int]]) -> None:
    """Write common.pt and metadata.json. Megatron's args have no token ids; `assemble` reads these back."""
    args = Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.num_heads,
        max_position_embeddings=model.max_positions,
        seq_length=model.max_positions,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_std,
        norm_epsilon=model.layer_norm_eps,
        layernorm_epsilon=model.layer_norm_eps,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.padded_vocab_size(1),
        make_vocab_size_divisible_by=model.vocab_multiple,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        add_position_embedding=True,
        **token_ids,
        **core_mapping(model).write(model),
    )
    common = io.BytesIO()
    torch.save({"args": args, "iteration": 0, "checkpoint_version": 3.0}, common)
    write_atomic(folder / COMMON, common.getvalue())
    backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    write_atomic(folder / "metadata.json", json.dumps(backend).encode())
