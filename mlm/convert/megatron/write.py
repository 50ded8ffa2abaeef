"""Our models as Megatron Core stores them: names, order of rows, arguments, and files.

Names and arguments are Megatron-LM's with its defaults and Transformer Engine. A table of tokens is padded
with zeros, as Megatron pads it.
"""

import io
import json
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import row_blocks
from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.slices import Read, Region
from mlm.convert.dcp.writer import DCPTensor
from mlm.convert.megatron.distributed import BACKEND, COMMON
from mlm.convert.megatron.files import MODEL_FILES, rank_folder
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
    """Megatron's tensors, computed from ours as they are read."""

    model: ModelConfig
    read: Read
    """Returns elements of a parameter, by its name and shape in `parameters(model)`."""
    dtype: torch.dtype
    tp: int = 1
    pp: int = 1

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
        return self.model.padded_vocab_size(self.tp)

    def tensors(self) -> dict[str, TensorEntry]:
        """Return the tensors by our names for Megatron's, padded."""
        stored = stored_parameters(self.model, self.mapping.layouts(self.model, self.tp))
        for name in stored.keys() & TABLES:
            entry = stored[name]
            stored[name] = TensorEntry((self.rows, *entry.shape[1:]), entry.dtype, entry.split)
        return stored

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a full tensor of that shape."""
        layouts = self.mapping.layouts(self.model, self.tp)

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
        """Return what every rank file, or common.pt, holds in addition to tensors."""
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
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            add_position_embedding=True,
            **self.mapping.write(model),
        )
        return {"args": args, "iteration": 0, "checkpoint_version": 3.0}


def core_tensors(writer: MegatronWriter, *, stacked: bool) -> tuple[dict[str, DCPTensor], Read]:
    """Return Megatron Core's tensors for a DCP folder, an item for each layer, and what reads them.

    `stacked` makes one tensor of all layers, as torch_dist has them; else each has a number.
    """
    # Megatron's name -> index of the layer, () for none -> our name and entry
    sources: dict[str, dict[tuple[int, ...], tuple[str, TensorEntry]]] = {}
    for name, entry in writer.tensors().items():
        theirs, layer = writer.mapping.core_name(name)
        if stacked and layer is not None:
            sources.setdefault(theirs.replace(".{}", ""), {})[layer,] = name, entry
        else:
            sources[theirs.format(layer)] = {(): (name, entry)}
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
    write_atomic(folder / BACKEND, json.dumps(backend).encode())


@dataclass(frozen=True)
class RankFile:
    """A file of the classic format: the tensors of a tensor-parallel and a pipeline rank."""

    path: str
    """mp_rank_01/model_optim_rng.pt, in the folder of the iteration."""
    t: int
    tensors: tuple[tuple[str, str, TensorEntry], ...]
    """Megatron's name, ours for it, and the full tensor."""


def rank_files(writer: MegatronWriter) -> Iterator[RankFile]:
    """Yield the files of tp * pp ranks. Raises UserError if the model cannot be split so."""
    model, kv_heads = writer.model, architecture_of(writer.model).kv_heads
    if model.num_heads % writer.tp or kv_heads % writer.tp or model.ffn_size % writer.tp:
        raise UserError(
            f"tp={writer.tp} does not divide the {kv_heads} heads of keys, or ffn={model.ffn_size}"
        )
    entries = writer.tensors()
    for p, stage in enumerate(split_layers(model.num_layers, writer.pp)):
        tensors = []
        for name, entry in entries.items():
            home = entry.split.stage
            is_here = home in stage.layers if isinstance(home, int) else getattr(stage, f"is_{home}")
            theirs, layer = writer.mapping.core_name(name)
            if is_here:
                number = None if layer is None else layer - stage.layers[0]
                tensors.append((theirs.format(number), name, entry))
        if stage.is_last and not stage.is_first and is_tied(model):
            tensors.append(("output_layer.weight", "token.weight", entries["token.weight"]))
        for t in range(writer.tp):
            yield RankFile(f"{rank_folder(t, p, writer.pp)}/{MODEL_FILES[0]}", t, tuple(tensors))


def write_rank_file(path: Path, file: RankFile, writer: MegatronWriter, progress: Advance) -> None:
    """Write one file; holds one tensor at a time. Raises OSError."""

    def shard(full: Tensor, dim: int | None) -> Tensor:
        return full if dim is None else full.chunk(writer.tp, dim)[file.t]

    # torch.save leaves room for tensors of which no page is touched; they are written there one by one.
    empty = {}
    for theirs, _, entry in file.tensors:
        shape = shard(torch.empty(entry.shape, device="meta"), entry.split.tp_dim).shape
        empty[theirs] = torch.empty(shape, dtype=writer.dtype)
    with open(path, "xb") as f, torch.serialization.skip_data():
        torch.save({**writer.common(), "model": empty}, f)
    with open(path, "r+b") as out, zipfile.ZipFile(out, "a") as records:
        for number, (_, name, entry) in enumerate(file.tensors):
            tensor = shard(writer.load(name, entry.shape), entry.split.tp_dim).contiguous()
            content = tensor.reshape(-1).view(torch.uint8).numpy().data
            record = records.getinfo(f"archive/data/{number}")
            assert len(content) == record.file_size, "not what was announced"
            with records.open(record):  # leaves the file at the record's first byte
                out.write(content)
            record.CRC = zlib.crc32(content)
            progress(len(content))
        records.comment = b""  # so that the directory is written again, with these checksums
