"""Our models as Megatron Core stores them: names, order of rows, arguments, and files.

Names and arguments are Megatron-LM's with its defaults and Transformer Engine. A table of tokens is padded
with zeros, as Megatron pads it.
"""

import io
import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import row_blocks
from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.slices import Read, Region
from mlm.convert.dcp.writer import DCPTensor
from mlm.convert.megatron.distributed import COMMON
from mlm.convert.megatron.mapping import THROUGH_HF, MegatronMapping
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.convert.megatron.model import stored_parameters
from mlm.convert.row_layouts import reorder_rows, short_name
from mlm.models.config import ModelConfig
from mlm.models.shape import architecture_of
from mlm.util.errors import UserError
from mlm.util.files import write_atomic

RELEASE = "release"
"""Folder of a checkpoint that Megatron-LM starts from without an optimizer."""
TABLES = ("token.weight", "output.weight", "mlm_head.vocabulary.bias")
"""Tensors with a row per token."""


@dataclass(frozen=True)
class MegatronWriter:
    """Megatron's tensors, computed from ours as they are read."""

    model: ModelConfig
    read: Read
    """Returns elements of a parameter, by its name and shape in `parameters(model)`."""
    dtype: torch.dtype

    @property
    def mapping(self) -> MegatronMapping:
        """Names and arguments of the family. Raises UserError if Megatron has no such model."""
        mapping = MAPPINGS.get(self.model.kind)
        if mapping is None:
            raise UserError(f"model.kind={self.model.kind}: Megatron has no such model")
        if self.model.head != "language_model":
            raise UserError(f"model.head={self.model.head}: Megatron has the heads of pretraining alone")
        if experts := architecture_of(self.model).experts:
            raise UserError(f"model.options.num_experts={experts}: {THROUGH_HF}")
        if problem := mapping.problem(self.model):
            raise UserError(f"Megatron Core has no such model: {problem}")
        return mapping

    @property
    def rows(self) -> int:
        """Rows of the token table, padding included."""
        return self.model.padded_vocab_size(1)

    def tensors(self) -> dict[str, TensorEntry]:
        """Return the tensors by our names for Megatron's, padded."""
        stored = stored_parameters(self.model, self.mapping.layouts(self.model))
        for name in stored.keys() & TABLES:
            entry = stored[name]
            stored[name] = TensorEntry((self.rows, *entry.shape[1:]), entry.dtype, entry.split)
        return stored

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a full tensor of that shape."""
        layouts = self.mapping.layouts(self.model)

        def load_ours(part: str) -> Tensor:
            rows = layouts.ours[short_name(part)].rows
            rest = () if part.endswith("bias") else (self.model.hidden_size,)
            return self.read(part, Region.whole((rows, *rest)))

        if short_name(name) in layouts.theirs:
            return reorder_rows(name, layouts.ours, layouts.theirs, load_ours).to(self.dtype)
        if name not in TABLES:
            return self.read(name, Region.whole(shape)).to(self.dtype)
        padded = torch.zeros(shape, dtype=self.dtype)
        for region in row_blocks((self.model.vocab_size, *shape[1:]), 4):  # not two tables in memory
            padded[region.within(Region.whole(shape))] = self.read(name, region)
        return padded

    def common(self) -> dict[str, Any]:
        """Return what common.pt holds."""
        model = self.model
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
            padded_vocab_size=self.rows,
            make_vocab_size_divisible_by=model.vocab_multiple,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            add_position_embedding=True,
            **self.mapping.write(model),
        )
        return {"args": args, "iteration": 0, "checkpoint_version": 3.0}


def core_tensors(writer: MegatronWriter) -> tuple[dict[str, DCPTensor], Read]:
    """Return Megatron Core's tensors for a DCP folder, an item for each layer, and what reads them.

    Those of all layers are one tensor, with the layer as its first dim.
    """
    # Megatron's name -> index of the layer, () for none -> our name and entry
    sources: dict[str, dict[tuple[int, ...], tuple[str, TensorEntry]]] = {}
    for name, entry in writer.tensors().items():
        theirs, layer = writer.mapping.core_name(name)
        index = () if layer is None else (layer,)
        sources.setdefault(theirs.replace(".{}", ""), {})[index] = name, entry
    tensors: dict[str, DCPTensor] = {}
    for key, layers in sources.items():
        shape, counts = next(iter(layers.values()))[1].shape, [1 + number for number in max(layers)]
        rows = [Region((*n, *(0 for _ in shape)), (*(1 for _ in n), *shape)) for n in sorted(layers)]
        tensors[key] = DCPTensor((*counts, *shape), writer.dtype, tuple(rows))

    def read(key: str, region: Region) -> Tensor:
        depth = len(next(iter(sources[key])))
        name, entry = sources[key][region.offset[:depth]]
        return writer.load(name, entry.shape).reshape(region.size)

    return tensors, read


def write_common(folder: Path, writer: MegatronWriter) -> None:
    common = io.BytesIO()
    torch.save(writer.common(), common)
    write_atomic(folder / COMMON, common.getvalue())
    backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    write_atomic(folder / "metadata.json", json.dumps(backend).encode())
