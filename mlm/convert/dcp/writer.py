"""Folders that torch.distributed.checkpoint reads, written one piece of a tensor at a time.

Its own writer takes a state in memory; the pieces, files of bounded size and an interrupted conversion that
continues are ours, the bytes of an item and of `.metadata` PyTorch's. They are a function of the content
alone.
"""

import os
import pickle
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

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
from mlm.checkpoint.native.stream import group_by_size
from mlm.convert.dcp.metadata import METADATA, DCPTensor
from mlm.util.files import fsync_directory, write_atomic
from mlm.util.terminal import Advance


class Item(NamedTuple):
    """A piece of a tensor to write."""

    name: str
    region: Region


def plan_files(tensors: Mapping[str, DCPTensor], most: int) -> dict[str, list[Item]]:
    """Distribute the items over files of about `most` bytes, in order."""
    items = [Item(name, region) for name, tensor in tensors.items() for region in tensor.regions]
    groups = group_by_size(items, lambda item: item.region.volume * tensors[item.name].dtype.itemsize, most)
    return {f"__0_{number}.distcp": items for number, items in enumerate(groups)}


def write_items(
    path: Path, items: Iterable[Item], tensors: Mapping[str, DCPTensor], read: Read, progress: Advance
) -> list[int]:
    """Write a new file of items and fsync it; return the bytes of each. Raises OSError."""
    lengths = []
    with open(path, "xb") as f:
        for name, region in items:
            tensor, begin = read(name, region).contiguous(), f.tell()
            assert (tensor.dtype, tuple(tensor.shape)) == (tensors[name].dtype, region.size)
            if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save would write all of it
                tensor = tensor.clone()
            try:
                torch.save(tensor, f)
            except RuntimeError as error:  # as it closes an archive of which the disk took a part
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None
            lengths.append(f.tell() - begin)
            progress(tensor.nbytes)
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
        MetadataIndex(name, Size(region.offset)): _StorageInfo(file, end - length, length)
        for file, items in files.items()
        for (name, region), length, end in zip(items, lengths[file], accumulate(lengths[file]), strict=True)
    }
    described: dict[str, STORAGE_TYPES] = {
        name: TensorStorageMetadata(
            TensorProperties(tensor.dtype),
            Size(tensor.shape),
            [ChunkStorageMetadata(Size(region.offset), Size(region.size)) for region in tensor.regions],
        )
        for name, tensor in tensors.items()
    }
    metadata = Metadata(described, {name: (name,) for name in tensors}, stored, version="1.0.0")
    write_atomic(folder / METADATA, pickle.dumps(metadata))
    fsync_directory(folder)
