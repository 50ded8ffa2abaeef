"""Declarations of ranks before a save, as bytes, and the global tensors that they make.

A declaration is a table of tensors, as compressed JSON, and the columns of the pieces that a rank holds.
Ranks with parts of the same tensors send the same table, which is parsed once.
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from mlm.checkpoint.native.columns import (
    Chunk,
    Columns,
    Ints,
    columns_of,
    decode_columns,
    dims_of,
    encode_columns,
    first_tiling_problem,
    padded,
)
from mlm.checkpoint.native.format import DTYPE_NAMES, DTYPES, CheckpointError, TensorEntry
from mlm.checkpoint.native.slices import TensorShard, TensorSplit

HEAD = struct.Struct("<Q")
"""Bytes of the table, which follows; then the columns."""


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def declare_shards(shards: Mapping[str, TensorShard], step: int, main_step: int) -> bytes:
    """Encode the tensors that this rank declares, and the regions that it holds. Raises CheckpointError."""
    if step != main_step:
        raise CheckpointError(f"ranks save different steps: {step} and {main_step} (rank 0)")
    for name, shard in shards.items():
        if shard.tensor.dtype not in DTYPE_NAMES or name == "__metadata__":
            raise CheckpointError(f"{name} of {shard.tensor.dtype} cannot be stored")
    rows = [
        [name, DTYPE_NAMES[shard.tensor.dtype], shard.global_shape, asdict(shard.split)]
        for name, shard in shards.items()
    ]
    chunks = [[Chunk("", shard.region)] if shard.tensor.numel() else [] for shard in shards.values()]
    columns = columns_of([shard.global_shape for shard in shards.values()], chunks, [""])
    table = zlib.compress(json.dumps(rows).encode(), 1)
    return HEAD.pack(len(table)) + table + encode_columns(columns)


def merge_declared(root: Path, declared: Sequence[bytes]) -> dict[str, TensorEntry]:
    """Return the global tensors that the ranks' pieces tile. Raises CheckpointError if they do not."""
    entries: dict[str, TensorEntry] = {}
    tables: dict[bytes, tuple[Ints, list[tuple[int, ...]]]] = {}
    """Number of each tensor of a table in `entries`, and its shape."""
    parts: list[tuple[Ints, int, Columns]] = []
    for rank, content in enumerate(declared):
        end = HEAD.size + HEAD.unpack_from(content)[0]
        table = content[HEAD.size : end]
        if table not in tables:
            rows = json.loads(zlib.decompress(table))
            for name, dtype, shape, split in rows:
                entry = TensorEntry(tuple(shape), DTYPES[dtype], TensorSplit(**split))
                first = entries.setdefault(name, entry)
                if (first.shape, first.dtype) != (entry.shape, entry.dtype):
                    raise CheckpointError(
                        f"{root}: {name} is {dtype} {shape} on rank {rank}, "
                        f"{DTYPE_NAMES[first.dtype]} {list(first.shape)} on another: nothing was saved"
                    )
            numbers = {name: number for number, name in enumerate(entries)}
            tensor_numbers = np.array([numbers[name] for name, *_ in rows], np.int32)
            tables[table] = tensor_numbers, [tuple(shape) for _, _, shape, _ in rows]
        row_numbers, shapes = tables[table]
        columns = decode_columns(content[end:], shapes, 1)
        parts.append((row_numbers[columns.tensor], rank, columns))
    shapes = [entry.shape for entry in entries.values()]
    dims = dims_of(shapes)
    tensor = np.concatenate([tensors for tensors, _, _ in parts])
    order = np.argsort(tensor, kind="stable")  # by tensor, then by rank
    columns = Columns(
        shapes,
        tensor[order],
        np.concatenate([np.full(len(tensors), rank, np.int32) for tensors, rank, _ in parts])[order],
        np.concatenate([padded(part.offset, dims, 0) for *_, part in parts])[order],
        np.concatenate([padded(part.size, dims, 1) for *_, part in parts])[order],
    )
    chunks = columns.by_tensor([file_name(rank) for rank in range(len(declared))])
    if problem := first_tiling_problem(entries, shapes, chunks):
        raise CheckpointError(f"{root}: {problem}: nothing was saved")
    return {n: replace(entry, chunks=c) for (n, entry), c in zip(entries.items(), chunks, strict=True)}
