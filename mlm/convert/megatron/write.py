"""A model of ours as Megatron Core stores it: names, order of rows, arguments, and files.

Names and arguments are those of Megatron-LM's defaults, with Transformer Engine. A table of tokens is
padded with zeros, as Megatron pads it.
"""

import json
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import row_blocks
from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.slices import Read, Region
from mlm.convert.dcp.metadata import DCPTensor
from mlm.convert.megatron.distributed import BACKEND, COMMON
from mlm.convert.megatron.files import MODEL_FILES
from mlm.convert.megatron.mapping import THROUGH_HF, MegatronMapping
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.convert.megatron.model import stored_parameters
from mlm.convert.row_layouts import reorder_rows, short_name
from mlm.models.config import ModelConfig
from mlm.models.shape import architecture_of, is_tied
from mlm.models.stage import split_layers
from mlm.util.errors import UserError
from mlm.util.files import write_atomic
from mlm.util.terminal import Advance

RELEASE = "release"
"""Folder of a checkpoint that Megatron-LM starts from without an optimizer."""
TABLES = ("token.weight", "output.weight", "mlm_head.vocabulary.bias")
"""Tensors with a row per token."""


@dataclass(frozen=True)
class MegatronWriter:
    """Tensors of Megatron, made of ours as they are read."""

    model: ModelConfig
    read: Read
    """Returns elements of a parameter of ours, by its name and shape in `parameters(model)`."""
    dtype: torch.dtype
    tp: int = 1
    pp: int = 1

    @property
    def mapping(self) -> MegatronMapping:
        """Names and arguments of the family. Raises UserError if Megatron has no such model."""
        mapping = MAPPINGS.get(self.model.kind)
        if mapping is None:
            raise UserError(f"model.kind={self.model.kind}: Megatron has no such model")
        if architecture_of(self.model).experts:
            raise UserError(f"model.options.num_experts={architecture_of(self.model).experts}: {THROUGH_HF}")
        if problem := mapping.problem(self.model):
            raise UserError(f"Megatron Core has no such model: {problem}")
        return mapping

    @property
    def rows(self) -> int:
        """Rows of the token table, padding included."""
        return self.model.padded_vocab_size(self.tp)

    def tensors(self) -> dict[str, TensorEntry]:
        """Return the tensors by our names for Megatron's, padded."""
        stored = stored_parameters(self.model, self.mapping.layouts(self.model, self.tp))
        return {
            name: TensorEntry((self.rows, *one.shape[1:]), one.dtype, one.split) if name in TABLES else one
            for name, one in stored.items()
        }

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a whole tensor of that shape."""
        layouts = self.mapping.layouts(self.model, self.tp)
        if short_name(name) in layouts.theirs:
            return reorder_rows(name, layouts.ours, layouts.theirs, self._load_ours).to(self.dtype)
        if name not in TABLES:
            return self.read(name, Region.whole(shape)).to(self.dtype)
        padded = torch.zeros(shape, dtype=self.dtype)
        for region in row_blocks((self.model.vocab_size, *shape[1:]), 4):  # not two tables in memory
            padded[region.within(Region.whole(shape))] = self.read(name, region)
        return padded

    def _load_ours(self, name: str) -> Tensor:
        """Return a whole parameter of ours that is part of a layout tensor."""
        layouts = self.mapping.layouts(self.model, self.tp)
        rows = layouts.ours[short_name(name)].rows
        shape = (rows,) if name.endswith("bias") else (rows, self.model.hidden_size)
        return self.read(name, Region.whole(shape))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a run that has this model."""
        model = self.model
        return {
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "ffn_hidden_size": model.ffn_size,
            "num_attention_heads": model.num_heads,
            "max_position_embeddings": model.max_positions,
            "seq_length": model.max_positions,
            "hidden_dropout": model.hidden_dropout,
            "attention_dropout": model.attention_dropout,
            "init_method_std": model.init_std,
            "norm_epsilon": model.layer_norm_eps,
            "layernorm_epsilon": model.layer_norm_eps,
            "vocab_size": model.vocab_size,
            "padded_vocab_size": self.rows,
            "make_vocab_size_divisible_by": model.vocab_multiple,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "add_position_embedding": True,
            **self.mapping.write(model),
        }

    def common(self) -> dict[str, Any]:
        """Return what every file of ranks, or common.pt, holds beside tensors."""
        return {"args": Namespace(**self.arguments()), "iteration": 0, "checkpoint_version": 3.0}


def core_tensors(
    writer: MegatronWriter, *, stacked: bool
) -> tuple[dict[str, DCPTensor], Callable[[str, Region], Tensor]]:
    """Return Megatron Core's tensors for a DCP folder, an item for each layer, and what reads them.

    `stacked` makes one tensor of all layers, as torch_dist has them; else each has a number.
    """
    sources: dict[str, dict[tuple[int, ...], tuple[str, TensorEntry]]] = {}
    for name, tensor in writer.tensors().items():
        theirs, layer = writer.mapping.core_name(name)
        key = theirs if layer is None else theirs.replace(".{}", "") if stacked else theirs.format(layer)
        index = (layer,) if stacked and layer is not None else ()
        sources.setdefault(key, {})[index] = name, tensor
    forms: dict[str, DCPTensor] = {}
    for key, held in sources.items():
        shape, counts = next(iter(held.values()))[1].shape, [1 + number for number in max(held)]
        rows = [Region((*n, *(0 for _ in shape)), (*(1 for _ in n), *shape)) for n in sorted(held)]
        forms[key] = DCPTensor((*counts, *shape), writer.dtype, tuple(rows))

    def read(key: str, region: Region) -> Tensor:
        depth = len(next(iter(sources[key])))
        name, tensor = sources[key][region.offset[:depth]]
        return writer.load(name, tensor.shape).reshape(region.size)

    return forms, read


def write_common(folder: Path, writer: MegatronWriter) -> None:
    """Write common.pt and metadata.json of a torch_dist folder."""
    with open(folder / COMMON, "xb") as f:
        torch.save(writer.common(), f)
    backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    write_atomic(folder / BACKEND, json.dumps(backend).encode())


@dataclass(frozen=True)
class RankFile:
    """A file of the classic format: the tensors of a tensor-parallel and a pipeline rank."""

    folder: str
    """mp_rank_01 or mp_rank_01_002."""
    t: int
    held: tuple[tuple[str, str, TensorEntry], ...]
    """Megatron's name, ours for it, and the whole tensor."""

    @property
    def path(self) -> str:
        """Path of the file in the folder of the iteration."""
        return f"{self.folder}/{MODEL_FILES[0]}"


def rank_files(writer: MegatronWriter) -> Iterator[RankFile]:
    """Yield the files of tp * pp ranks. Raises UserError if the model cannot be split so."""
    model = writer.model
    kv_heads = architecture_of(model).kv_heads
    if model.num_heads % writer.tp or kv_heads % writer.tp or model.ffn_size % writer.tp:
        raise UserError(
            f"tp={writer.tp} does not divide the {kv_heads} heads of keys, or ffn={model.ffn_size}"
        )
    tensors = writer.tensors()
    for p, stage in enumerate(split_layers(model.num_layers, writer.pp)):
        held = []
        for name, tensor in tensors.items():
            home = tensor.split.stage
            is_here = home in stage.layers if isinstance(home, int) else getattr(stage, f"is_{home}")
            theirs, layer = writer.mapping.core_name(name)
            if is_here:
                held.append((theirs.format(None if layer is None else layer - stage.layers[0]), name, tensor))
        if stage.is_last and not stage.is_first and is_tied(model):
            held.append(("output_layer.weight", "token.weight", tensors["token.weight"]))
        for t in range(writer.tp):
            number = f"mp_rank_{t:02d}" + (f"_{p:03d}" if writer.pp > 1 else "")
            yield RankFile(number, t, tuple(held))


def write_rank_file(path: Path, file: RankFile, writer: MegatronWriter, progress: Advance) -> None:
    """Write one file; holds one tensor at a time. Raises OSError."""

    def shard(full: Tensor, dim: int | None) -> Tensor:
        return full if dim is None else full.chunk(writer.tp, dim)[file.t]

    # torch.save leaves room for tensors of which no page is touched; they are written there one by one.
    empty = {}
    for theirs, _, one in file.held:
        shape = shard(torch.empty(one.shape, device="meta"), one.split.tp_dim).shape
        empty[theirs] = torch.empty(shape, dtype=writer.dtype)
    with open(path, "xb") as f, torch.serialization.skip_data():
        torch.save({**writer.common(), "model": empty}, f)
    with open(path, "r+b") as out, zipfile.ZipFile(out, "a") as records:
        for number, (_, name, one) in enumerate(file.held):
            tensor = shard(writer.load(name, one.shape), one.split.tp_dim).contiguous()
            content = tensor.reshape(-1).view(torch.uint8).numpy().data
            record = records.getinfo(f"archive/data/{number}")
            assert len(content) == record.file_size, "not what was announced"
            with records.open(record):  # leaves the file at the record's first byte
                out.write(content)
            record.CRC = zlib.crc32(content)
            progress(len(content))
        records.comment = b""  # so that the directory is written again, with these checksums
