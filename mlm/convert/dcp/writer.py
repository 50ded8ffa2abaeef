"""Files that torch.load and torch.distributed.checkpoint read, written one tensor at a time.

Their pickles are spelled out by `pickled.py`: no object is pickled, and memory holds one piece. The bytes are
a function of the content alone.
"""

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from mlm.checkpoint.native.shard_file import Form
from mlm.checkpoint.native.slices import Read, Region
from mlm.checkpoint.native.stream import group_by_size
from mlm.convert.dcp.metadata import CLASSES, METADATA, STORAGE_INFO
from mlm.convert.dcp.pickled import call, dtype_name, instance, size, write_pickle
from mlm.convert.dcp.torch_file import REBUILD, STORAGES, Window
from mlm.convert.dcp.unpickled import Name, PersistentId, Record
from mlm.util.files import CHUNK, fsync_directory, write_atomic

ALIGNMENT = 64
LARGE = 1 << 31
"""Bytes from which a record needs 64-bit sizes."""
Progress = Callable[[int], None]


class Item(NamedTuple):
    """A piece of a tensor to write."""

    name: str
    region: Region


@dataclass(frozen=True)
class DCPTensor:
    """A tensor to write, in the pieces of which each becomes an item."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[Region, ...]


def tensor_record(key: str, form: Form) -> Record:
    """Return the description of a contiguous tensor whose bytes are record data/`key` of the same file."""
    strides, step = [], 1
    for extent in reversed(form.shape):
        strides.append(step)
        step *= extent
    storage = ("storage", Name(f"torch.{STORAGES[form.dtype]}"), key, "cpu", step)
    hooks = call("collections.OrderedDict")
    return call(REBUILD, PersistentId(storage), 0, form.shape, tuple(reversed(strides)), False, hooks)


def write_torch_file(
    f: BinaryIO,
    value: Any,
    tensors: Iterable[tuple[str, Form, Callable[[], Tensor]]],
    progress: Progress = lambda count: None,
) -> int:
    """Write what torch.load reads from the end of `f` on; return the bytes.

    `value` holds a `tensor_record` of each of `tensors` (key, form, read), which are read in order.
    """
    begin = f.seek(0, os.SEEK_END)
    window = Window(f, begin)
    with zipfile.ZipFile(window, "w", zipfile.ZIP_STORED) as records:
        for name, content in (("data.pkl", write_pickle(value)), ("byteorder", b"little")):
            _write_record(records, window, name, len(content), [memoryview(content)])
        for key, form, read in tensors:
            _write_record(records, window, f"data/{key}", form.num_bytes, _bytes_of(read, form, progress))
        _write_record(records, window, "version", 2, [memoryview(b"3\n")])
    return f.seek(0, os.SEEK_END) - begin


def _write_record(
    records: zipfile.ZipFile, window: Window, name: str, count: int, parts: Iterable[memoryview]
) -> None:
    info = zipfile.ZipInfo(f"archive/{name}")
    is_large = count >= LARGE
    at = window.tell() + 30 + len(info.filename) + (20 if is_large else 0) + 4
    padding = -at % ALIGNMENT  # as torch.save pads, so that a file can be mapped into memory
    info.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
    info.file_size = count
    with records.open(info, "w", force_zip64=is_large) as record:
        for part in parts:
            record.write(part)


def _bytes_of(read: Callable[[], Tensor], form: Form, progress: Progress) -> Iterator[memoryview]:
    tensor = read()
    assert (tensor.dtype, tuple(tensor.shape)) == (form.dtype, form.shape), "not what was announced"
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for first in range(0, len(flat), CHUNK):
        yield flat[first : first + CHUNK]
        progress(min(CHUNK, len(flat) - first))


def plan_files(tensors: Mapping[str, DCPTensor], most: int) -> dict[str, list[Item]]:
    """Distribute the items over files of about `most` bytes, in order."""
    items = [Item(name, region) for name, tensor in tensors.items() for region in tensor.regions]
    groups = group_by_size(items, lambda item: item.region.volume * tensors[item.name].dtype.itemsize, most)
    return {f"__0_{number}.distcp": items for number, items in enumerate(groups)}


def write_items(
    path: Path, items: Iterable[Item], tensors: Mapping[str, DCPTensor], read: Read, progress: Progress
) -> list[int]:
    """Write a new file of items and fsync it; return the bytes of each. Raises OSError that names it."""
    lengths = []
    with open(path, "x+b") as f:
        for name, region in items:
            form = Form(tensors[name].dtype, region.size)
            lengths.append(
                write_torch_file(
                    f,
                    tensor_record("0", form),
                    [("0", form, lambda name=name, region=region: read(name, region))],  # type: ignore[misc]
                    progress,
                )
            )
        f.flush()
        os.fsync(f.fileno())
    return lengths


def write_metadata(
    folder: Path,
    tensors: Mapping[str, DCPTensor],
    files: Mapping[str, list[Item]],
    lengths: Mapping[str, list[int]],
) -> None:
    """Write `.metadata` of the items in `files`, whose bytes are in `lengths`."""
    stored = {
        instance(f"{CLASSES}.MetadataIndex", {"fqn": name, "offset": size(region.offset), "index": None}): (
            instance(
                STORAGE_INFO,
                {"relative_path": file, "offset": begin, "length": length, "transform_descriptors": None},
            )
        )
        for file, items in files.items()
        for (name, region), begin, length in _with_offsets(items, lengths[file])
    }
    fields = {
        "state_dict_metadata": {name: _tensor_metadata(tensor) for name, tensor in tensors.items()},
        "planner_data": {name: (name,) for name in tensors},
        "storage_data": stored,
        "storage_meta": None,
        "version": "1.0.0",
    }
    write_atomic(folder / METADATA, write_pickle(instance(f"{CLASSES}.Metadata", fields)))
    fsync_directory(folder)


def _with_offsets(items: list[Item], lengths: list[int]) -> Iterator[tuple[Item, int, int]]:
    begin = 0
    for item, length in zip(items, lengths, strict=True):
        yield item, begin, length
        begin += length


def _tensor_metadata(tensor: DCPTensor) -> Record:
    layout = call("torch.serialization._get_layout", "torch.strided")
    properties = instance(
        f"{CLASSES}.TensorProperties",
        (dtype_name(tensor.dtype), layout, False, call(f"{CLASSES}._MEM_FORMAT_ENCODING", 0), False),
    )
    chunks = [
        instance(
            f"{CLASSES}.ChunkStorageMetadata", {"offsets": size(region.offset), "sizes": size(region.size)}
        )
        for region in tensor.regions
    ]
    fields = {"properties": properties, "size": size(tensor.shape), "chunks": chunks}
    return instance(f"{CLASSES}.TensorStorageMetadata", fields)
