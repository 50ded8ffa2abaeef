"""Declarations of ranks before a save, as bytes, and the global tensors that they make.

A declaration is a table of tensors, compressed JSON, and columns of numbers, one row per piece. Ranks that
hold parts of the same tensors send the same table, which is parsed once.
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mlm.checkpoint.native.columns import Columns, Ints, columns_problem, dims_of, padded
from mlm.checkpoint.native.format import DTYPE_NAMES, DTYPES, CheckpointError, TensorEntry
from mlm.checkpoint.native.slices import Shard, Split

HEAD = struct.Struct("<QQ")
"""Rows and dims; then offset and size, int64 [rows, dims] each, tensor, int32 [rows], and the table."""


def file_name(rank: int) -> str:
    """Name of the shard file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def declare_shards(shards: Mapping[str, Shard], step: int, main_step: int) -> bytes:
    """The tensors that this rank declares, and the regions of them that it holds."""
    if step != main_step:
        raise CheckpointError(f"ranks save different steps: {step} and {main_step} (rank 0)")
    for name, shard in shards.items():
        if shard.tensor.dtype not in DTYPE_NAMES or name == "__metadata__":
            raise CheckpointError(f"{name} of {shard.tensor.dtype} cannot be stored")
    table = [
        [name, DTYPE_NAMES[shard.tensor.dtype], shard.global_shape, shard.split and asdict(shard.split)]
        for name, shard in shards.items()
    ]
    held = [(i, shard.region) for i, shard in enumerate(shards.values()) if shard.tensor.numel()]
    dims = dims_of([piece.offset for _, piece in held])
    offset = [(*piece.offset, *[0] * (dims - len(piece.offset))) for _, piece in held]
    size = [(*piece.size, *[1] * (dims - len(piece.size))) for _, piece in held]
    columns = ((offset, "<i8"), (size, "<i8"), ([i for i, _ in held], "<i4"))
    numbers = b"".join(np.array(column, kind).tobytes() for column, kind in columns)
    return HEAD.pack(len(held), dims) + numbers + zlib.compress(json.dumps(table).encode(), 1)


class _Tensors:
    """The tensors of all tables, numbered in the order they were first named."""

    def __init__(self, root: Path) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self._root = root
        self._numbers: dict[str, int] = {}
        self._tables: dict[bytes, Ints] = {}

    def numbers(self, table: bytes, rank: int) -> Ints:
        """The number of each tensor of a rank's table. Raises CheckpointError where ranks disagree."""
        if table not in self._tables:
            said = json.loads(zlib.decompress(table))
            self._tables[table] = np.array([self._number(rank, *row) for row in said], np.int64)
        return self._tables[table]

    def _number(
        self, rank: int, name: str, dtype: str, shape: Sequence[int], split: dict[str, int] | None
    ) -> int:
        entry = TensorEntry(tuple(shape), DTYPES[dtype], (), Split(**split) if split else None)
        known = self.entries.setdefault(name, entry)
        if (known.shape, known.dtype) != (entry.shape, entry.dtype):
            raise CheckpointError(
                f"{self._root}: {name} is {dtype} {shape} on rank {rank}, "
                f"{DTYPE_NAMES[known.dtype]} {list(known.shape)} on another: nothing was saved"
            )
        return self._numbers.setdefault(name, len(self._numbers))


def merge_declared(root: Path, declared: Sequence[bytes]) -> dict[str, TensorEntry]:
    """The global tensors that the ranks' pieces make. Raises CheckpointError unless they tile them."""
    tensors, found = _Tensors(root), []
    for rank, said in enumerate(declared):
        rows, dims = HEAD.unpack_from(said)
        offset = np.frombuffer(said, "<i8", rows * dims, HEAD.size).reshape(rows, dims)
        size = np.frombuffer(said, "<i8", rows * dims, HEAD.size + offset.nbytes).reshape(rows, dims)
        begin = HEAD.size + 2 * offset.nbytes
        numbers = tensors.numbers(bytes(said[begin + 4 * rows :]), rank)
        mine = numbers[np.frombuffer(said, "<i4", rows, begin)]
        found.append((mine, np.full(rows, rank, np.int32), offset, size))
    shapes = [entry.shape for entry in tensors.entries.values()]
    dims = dims_of(shapes)
    tensor = np.concatenate([mine for mine, *_ in found])
    narrow = tensor.astype(np.uint16) if len(shapes) < 1 << 16 else tensor  # sorted in linear time
    order = np.argsort(narrow, kind="stable")  # of a tensor, by rank
    columns = Columns(
        shapes,
        tensor[order].astype(np.int32),
        np.concatenate([file for _, file, *_ in found])[order],
        np.concatenate([padded(offset, dims, 0) for *_, offset, _ in found])[order],
        np.concatenate([padded(size, dims, 1) for *_, size in found])[order],
    )
    if problem := columns_problem(columns, list(tensors.entries)):
        raise CheckpointError(f"{root}: {problem}: nothing was saved")
    chunks = columns.by_tensor([file_name(rank) for rank in range(len(declared))])
    return {
        name: TensorEntry(entry.shape, entry.dtype, mine, entry.split)
        for (name, entry), mine in zip(tensors.entries.items(), chunks, strict=True)
    }
