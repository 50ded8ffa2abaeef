"""One shard file: safetensors, written as a stream and read in blocks, so that memory stays small.

Layout (https://huggingface.co/docs/safetensors): u64 little-endian header length, JSON header padded with
spaces to 8 bytes, then the tensors end to end. Ours are ordered by descending element size, so each is
aligned to its element. `__metadata__` carries the save id.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from mlm.checkpoint.format import DTYPE_NAMES, DTYPES, JSON, MAX_DIMS, RESTORE, FileEntry, regular_size
from mlm.checkpoint.rectangle import Rectangle
from mlm.config.errors import CorruptFileError, UserError
from mlm.files import CHUNK, digest_name

MAX_HEADER_BYTES = 1 << 26  # 64 MiB; parsed JSON takes many times its size (safetensors allows 100 MB)
BLOCK = 1 << 24  # bytes of rows read at a time: 16 MiB


@dataclass(frozen=True)
class Stored:
    """A tensor inside a shard file: `begin` is its first byte, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def write_shard_file(path: Path, tensors: Mapping[str, Tensor], save_id: str) -> FileEntry:
    """Write tensors (any device, any strides) to a new file and fsync it.

    Holds one contiguous CPU copy of one tensor at a time; the digest is that of the bytes meant, taken
    on the way to the disk. Raises OSError naming `path`, ValueError when there are too
    many tensors for one header.
    """
    assert sys.byteorder == "little", "safetensors holds little-endian numbers"
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    hasher = xxhash.xxh3_128()
    try:
        with open(path, "xb") as f:
            _append(f, hasher, memoryview(_header(ordered, save_id)))
            for _, tensor in ordered:
                _append(f, hasher, _bytes_of(tensor))
            f.flush()
            os.fsync(f.fileno())
            written = f.tell()
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e
    return FileEntry(written, digest_name(hasher))


def _append(f: BinaryIO, hasher: xxhash.xxh3_128, content: memoryview) -> None:
    for start in range(0, len(content), CHUNK):  # hashed and written while it is in the cache
        block = content[start : start + CHUNK]
        hasher.update(block)
        f.write(block)


def _header(ordered: list[tuple[str, Tensor]], save_id: str) -> bytes:
    header: dict[str, JSON] = {"__metadata__": {"save_id": save_id}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header needs {len(text)} bytes, {MAX_HEADER_BYTES} is the limit")
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read_header(path: Path, entry: FileEntry, save_id: str) -> dict[str, Stored]:
    """The tensors of a shard file, every offset checked against the file.

    Raises CorruptFileError when the file is missing, of another size than `entry` says, not safetensors,
    or of another save.
    """
    size = regular_size(path)
    if size != entry.bytes:
        raise CorruptFileError(f"{path}: {size} bytes, the manifest says {entry.bytes}. {RESTORE}")
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise CorruptFileError(f"{path}: not a safetensors file, header of {length} bytes. {RESTORE}")
        text = f.read(length)
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        found = metadata.get("save_id")
        stored = _stored_tensors(header, start=8 + length, size=size)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise CorruptFileError(f"{path}: damaged safetensors header, {e}. {RESTORE}") from e
    if found != save_id:
        raise CorruptFileError(f"{path}: a shard of another save stands in its place. {RESTORE}")
    return stored


def _stored_tensors(header: dict[str, JSON], *, start: int, size: int) -> dict[str, Stored]:
    stored, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in (begin, stop, *shape)):
            raise ValueError(f"{name} has an impossible offset or shape")
        if begin != end or stop - begin != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} does not lie where its shape puts it")
        stored[name], end = Stored(dtype, shape, start + begin), stop
    if start + end != size:
        raise ValueError(f"tensors end at byte {start + end} of {size}")
    return stored


def copy_region(f: BinaryIO, stored: Stored, region: Rectangle, chunk: Rectangle, target: Tensor) -> None:
    """Copy the part `region` of a stored `chunk` (both in global coordinates) into `target`, in place.

    `target` has the shape of `region`, any device and strides, and the stored dtype or another floating
    one. Reads whole rows of dim 0, at most BLOCK bytes (or one row) at a time. Raises CorruptFileError when
    the file ends early, UserError when a finite number would become infinite in the dtype of `target`.
    """
    columns = region.within(chunk)
    rows, tail = columns[0] if columns else slice(0, 1), stored.shape[1:]
    if not columns:
        target = target.unsqueeze(0)
    row_items = prod(tail)
    row_bytes = row_items * stored.dtype.itemsize
    step = max(1, BLOCK // row_bytes)
    buffer = bytearray(min(step, rows.stop - rows.start) * row_bytes)
    for first in range(rows.start, rows.stop, step):
        count = min(step, rows.stop - first)
        f.seek(stored.begin + first * row_bytes)
        if f.readinto(memoryview(buffer)[: count * row_bytes]) != count * row_bytes:  # type: ignore[attr-defined]
            raise CorruptFileError(f"{f.name}: ends early. {RESTORE}")
        block = torch.frombuffer(buffer, dtype=stored.dtype, count=count * row_items).view(count, *tail)
        piece = block[(slice(None), *columns[1:])]
        target[first - rows.start : first - rows.start + count].copy_(_converted(piece, target.dtype, f.name))


def _converted(piece: Tensor, dtype: torch.dtype, file: str) -> Tensor:
    if piece.dtype == dtype:
        return piece
    converted = piece.to(dtype)
    if torch.isfinite(piece).sum() != torch.isfinite(converted).sum():
        raise UserError(f"{file}: holds numbers too large for {dtype}. Load it with a wider precision.dtype")
    return converted
