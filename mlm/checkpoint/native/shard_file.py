"""Shard files in safetensors: written as a stream, in small memory, and their headers read.

Layout (https://huggingface.co/docs/safetensors): u64 little-endian header length, JSON header padded with
spaces to 8 bytes, then the tensors end to end. We order them by descending element size, so that each is
aligned to its elements. `__metadata__` holds the save id.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor

from mlm.checkpoint.native import format as layout
from mlm.checkpoint.native.format import (
    DTYPE_NAMES,
    DTYPES,
    JSON,
    MAX_DIMS,
    MAX_NAME,
    RESTORE,
    FileEntry,
)
from mlm.util.errors import CorruptFileError
from mlm.util.files import CHUNK, digest_name, parse_json

PIECE = 1 << 18  # bytes digested at a time: in the processor's cache
MAX_HEADER_BYTES = 1 << 26  # 64 MiB; parsed JSON takes many times its size (safetensors allows 100 MB)


class Form(NamedTuple):
    """Dtype and shape of a tensor to write, for the header, before its content is available."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Stored(NamedTuple):
    """A tensor in a shard file; `begin` is its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def form(self) -> Form:
        return Form(self.dtype, self.shape)


class Digester:
    """Digests of a file and of its blocks, taken on the way to the disk."""

    def __init__(self) -> None:
        self._whole, self._block = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._room, self._size = layout.DIGEST_BLOCK, 0
        self._blocks: list[str] = []

    def update(self, content: memoryview) -> None:
        self._size += len(content)
        while len(content):
            count = min(self._room, PIECE)
            piece, content = content[:count], content[count:]
            self._whole.update(piece)
            self._block.update(piece)
            self._room -= len(piece)
            if not self._room:
                self._end_block()

    def entry(self) -> FileEntry:
        if self._room < layout.DIGEST_BLOCK:
            self._end_block()
        return FileEntry(self._size, digest_name(self._whole), tuple(self._blocks))

    def _end_block(self) -> None:
        self._blocks.append(digest_name(self._block))
        self._block, self._room = xxhash.xxh3_128(), layout.DIGEST_BLOCK


T = TypeVar("T", Tensor, Form)


def write_shard_file(path: Path, tensors: Mapping[str, Tensor], save_id: str) -> FileEntry:
    """Write tensors (any device, any strides) to a new file and fsync it: see `write_stream`."""
    forms = {name: Form(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_stream(path, forms, tensors.__getitem__, {"save_id": save_id})


def write_stream(
    path: Path,
    forms: Mapping[str, Form],
    read_tensor: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    progress: Callable[[int], None] = lambda count: None,
) -> FileEntry:
    """Write a new safetensors file and fsync it; `read_tensor(name)` returns each tensor when it is written.

    Memory holds one contiguous CPU copy of one tensor; digests are computed from memory, not from the file.
    `metadata` goes into `__metadata__`; `progress` receives the tensor bytes written. Raises OSError naming
    `path`, ValueError if there are too many tensors for one header, and as `read_tensor` does.
    """
    assert sys.byteorder == "little", "safetensors holds little-endian numbers"
    ordered = in_order(forms)
    header = header_bytes([(name, form.dtype, form.shape) for name, form in ordered], metadata)
    digester = Digester()
    try:
        with open(path, "xb") as f:
            _append(f, digester, memoryview(header), lambda count: None)
            for name, form in ordered:
                tensor = read_tensor(name)
                assert Form(tensor.dtype, tuple(tensor.shape)) == form, "differs from its header entry"
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                _append(f, digester, flat.view(torch.uint8).numpy().data, progress)
                del tensor, flat  # before the next one is read
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e
    return digester.entry()


def _append(f: BinaryIO, digester: Digester, content: memoryview, progress: Callable[[int], None]) -> None:
    for start in range(0, len(content), CHUNK):  # hashed and written while it is in the cache
        block = content[start : start + CHUNK]
        digester.update(block)
        f.write(block)
        progress(len(block))


def in_order(tensors: Mapping[str, T]) -> list[tuple[str, T]]:
    """Sort names and tensors as in a file: descending element size, then by name."""
    return sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def header_bytes(
    ordered: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes before the tensors (name, dtype, shape). Raises ValueError if they are too many."""
    header: dict[str, JSON] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in ordered:
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header needs {len(text)} bytes, {MAX_HEADER_BYTES} is the limit")
    return len(text).to_bytes(8, "little") + text


def read_safetensors_header(
    path: Path, remedy: str = RESTORE
) -> tuple[Mapping[str, JSON], dict[str, Stored]]:
    """Return `__metadata__` and the tensors of any safetensors file, every offset checked against its size.

    Raises CorruptFileError, ending in `remedy`, for another file or an unknown dtype.
    """
    with open(path, "rb") as f:
        return parse_header(f.read, path, path.stat().st_size, remedy)


def parse_header(
    read_bytes: Callable[[int], bytes], path: Path, size: int, remedy: str
) -> tuple[Mapping[str, JSON], dict[str, Stored]]:
    """Parse a header; `read_bytes` reads an open file from its beginning, `path` is for messages."""
    length = int.from_bytes(read_bytes(8), "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise CorruptFileError(f"{path}: not a safetensors file, header of {length} bytes. {remedy}")
    text = read_bytes(length)
    try:
        header, stored, end = parse_json(text), dict[str, Stored](), 0
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError("__metadata__ is not an object")
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if not name.isprintable() or len(name) > MAX_NAME:
                raise ValueError(f"tensor name {name[:40]!r} is not allowed")
            begin, stop = entry["data_offsets"]
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} is of the unknown dtype {str(entry['dtype'])[:20]!r}")
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            if len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in (begin, stop, *shape)):
                raise ValueError(f"{name} has an impossible offset or shape")
            if begin != end or stop - begin != prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} does not lie where its shape puts it")
            stored[name], end = Stored(dtype, shape, 8 + length + begin), stop
        if 8 + length + end != size:
            raise ValueError(f"tensors end at byte {8 + length + end} of {size}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise CorruptFileError(f"{path}: damaged safetensors header, {e}. {remedy}") from e
    return metadata, stored
