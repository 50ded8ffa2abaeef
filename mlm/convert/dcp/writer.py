"""Folders that torch.distributed.checkpoint reads, written one piece of a tensor at a time.

PyTorch's writer needs the full state in memory; here pieces and files have bounded size. The bytes of items
and of `.metadata` are PyTorch's, and a function of the content alone.
"""

import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Size
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mlm.checkpoint.native.slices import Read, Region
from mlm.checkpoint.native.stream import WriteFile, group_by_size
from mlm.convert.dcp.metadata import METADATA
from mlm.util.files import fsync_directory, write_atomic
from mlm.util.terminal import Advance


@dataclass(frozen=True)
class DCPTensor:
    """A tensor to write; each of its regions becomes an item."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[Region, ...]


def write_dcp(
    folder: Path,
    tensors: Mapping[str, DCPTensor],
    load: Read,
    max_bytes: int,
    progress: Advance,
    write_file: WriteFile,
) -> None:
    """Write the items, in order, to files of about `max_bytes`, then their `.metadata`. Raises OSError."""
    folder.mkdir(exist_ok=True)
    items = [(name, region) for name, tensor in tensors.items() for region in tensor.regions]
    groups = group_by_size(items, lambda item: item[1].volume * tensors[item[0]].dtype.itemsize, max_bytes)
    stored = {}
    for number, group in enumerate(groups):
        file = f"__0_{number}.distcp"
        path = folder / file
        lengths = write_file(path, partial(_write_items, path, group, load, progress))
        for (name, region), length, end in zip(group, lengths, accumulate(lengths), strict=True):
            stored[MetadataIndex(name, Size(region.offset))] = _StorageInfo(file, end - length, length)
    entries: dict[str, STORAGE_TYPES] = {
        name: TensorStorageMetadata(
            TensorProperties(tensor.dtype),
            Size(tensor.shape),
            [ChunkStorageMetadata(Size(region.offset), Size(region.size)) for region in tensor.regions],
        )
        for name, tensor in tensors.items()
    }
    metadata = Metadata(entries, {name: (name,) for name in tensors}, stored, version="1.0.0")
    write_atomic(folder / METADATA, pickle.dumps(metadata))
    fsync_directory(folder)


def _write_items(path: Path, items: Iterable[tuple[str, Region]], load: Read, progress: Advance) -> list[int]:
    """Write a new file of items and fsync it; return the bytes of each."""
    lengths = []
    with open(path, "xb") as f:
        for name, region in items:
            tensor, begin = load(name, region).contiguous(), f.tell()
            assert tuple(tensor.shape) == region.size
            if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save would write the full storage
                tensor = tensor.clone()
            try:
                torch.save(tensor, f)
            except RuntimeError as error:  # raised on closing an archive on a full disk
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None
            lengths.append(f.tell() - begin)
            progress(tensor.nbytes)
        f.flush()
        os.fsync(f.fileno())
    return lengths
