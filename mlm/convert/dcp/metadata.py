"""`.metadata` of a folder of torch.distributed.checkpoint (DCP): locations of the pieces of each tensor.

    .metadata        a pickle of torch.distributed.checkpoint.metadata.Metadata
    __0_0.distcp …   items end to end, each a zip archive of torch.save that holds one piece

Megatron Core's torch_dist is such a folder with metadata.json and common.pt in it. The pickle is read as
plain data (`unpickled.py`); its class names are compared, never imported. Source:
https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlm.checkpoint.native.columns import Chunk, Chunks, tiling_problem
from mlm.checkpoint.native.format import DTYPES, MAX_DIMS, MAX_NAME
from mlm.checkpoint.native.slices import Region
from mlm.convert.dcp.unpickled import Name, PickleError, PickleNode, read_pickle
from mlm.util.errors import CorruptFileError, reading_from
from mlm.util.files import read_bounded

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 28
CLASSES = "torch.distributed.checkpoint.metadata"
FILE_NAME = re.compile(r"[\w-][\w.-]{0,200}\.distcp", re.ASCII)
DTYPES_BY_NAME = {str(dtype): dtype for dtype in DTYPES.values()}
COPY_AGAIN = "Copy the whole folder again"
ItemLocation = tuple[str, int, int]
"""File, first byte, bytes."""


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a tensor: the item of `length` bytes from byte `begin` of `file`."""

    region: Region
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a DCP folder, which its pieces tile."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]


def read_metadata(folder: Path, is_wanted: Callable[[str], bool]) -> dict[str, StoredTensor]:
    """Return the tensors whose names `is_wanted` accepts; other entries are not checked.

    Raises UserError without `.metadata`, CorruptFileError if it is not plain data, does not match the files,
    or the pieces of a tensor leave a hole or overlap.
    """
    with _open_metadata(folder) as fields:
        entries = {
            _check_name(name): entry
            for name, entry in fields["state_dict_metadata"].items()
            if entry.name == f"{CLASSES}.TensorStorageMetadata" and is_wanted(_check_name(name))
        }
        items: dict[tuple[str, tuple[int, ...]], ItemLocation] = {}
        for index, info in fields["storage_data"].items():
            position = index.fields(f"{CLASSES}.MetadataIndex")
            if (name := _check_name(position["fqn"])) not in entries:
                continue
            key = name, _read_sizes(position["offset"])
            if key in items:
                raise PickleError(f"{name}: two items at offset {list(key[1])}")
            stored = info.fields("torch.distributed.checkpoint.filesystem._StorageInfo")
            file = stored["relative_path"]
            if type(file) is not str or not FILE_NAME.fullmatch(file):
                raise PickleError(f"{name}: the file name {ascii(file)[:60]} is not allowed")
            if stored.get("transform_descriptors"):
                raise PickleError(f"{name}: compression or encryption by an extension is not supported")
            items[key] = file, _whole_number(stored["offset"]), _whole_number(stored["length"])
        tensors = {name: _read_tensor(name, entry, items) for name, entry in entries.items()}
        pieces = [(name, piece) for name, tensor in tensors.items() for piece in tensor.pieces]
        sizes = {file: _regular_size(folder / file) for file in sorted({piece.file for _, piece in pieces})}
        for name, piece in pieces:
            if (end := piece.begin + piece.length) > sizes[piece.file]:
                raise PickleError(f"{name}: its item ends at byte {end} of {piece.file}, which is shorter")
        for name, tensor in tensors.items():
            chunks = Chunks.of([Chunk(x.file, x.region) for x in tensor.pieces], len(tensor.shape))
            problem = None if 0 in tensor.shape else tiling_problem(tensor.shape, chunks)
            if problem is not None:
                raise PickleError(f"{name}: {problem}")
    return tensors


@contextmanager
def _open_metadata(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the fields of `.metadata`; errors become UserError and CorruptFileError that name it."""
    path = folder / METADATA
    try:
        with reading_from(path, COPY_AGAIN):
            _regular_size(path)
            value = read_pickle(read_bounded(path, MAX_METADATA_BYTES, COPY_AGAIN))
            yield value.fields(f"{CLASSES}.Metadata")
    except (PickleError, AttributeError, LookupError, TypeError) as error:
        reason = error if isinstance(error, PickleError) else "is no Metadata as PyTorch writes it"
        raise CorruptFileError(f"{path}: {reason}; nothing was executed. {COPY_AGAIN}") from error


def _regular_size(path: Path) -> int:
    """Return the bytes of a regular file. Raises PickleError for a link, a device or a FIFO."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise PickleError(f"{path.name} is a link or no plain file")
    return status.st_size


def _check_name(value: Any) -> str:
    if type(value) is not str or not value.isprintable() or len(value) > MAX_NAME:
        raise PickleError(f"tensor name {ascii(value)[:60]} is not allowed")
    return value


def _read_sizes(value: Any) -> tuple[int, ...]:
    numbers = value.args[0]
    if value.name != "torch.Size" or type(numbers) not in (tuple, list) or len(numbers) > MAX_DIMS:
        raise PickleError(f"a shape is not a list of at most {MAX_DIMS} numbers")
    return tuple(map(_whole_number, numbers))


def _whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise PickleError("an offset, a size or a length is not a whole number in range")
    return value


def _read_tensor(name: str, entry: PickleNode, items: Mapping[Any, ItemLocation]) -> StoredTensor:
    fields = entry.fields(f"{CLASSES}.TensorStorageMetadata")
    state, chunks = fields["properties"].state, fields["chunks"]
    dtype_name = state["dtype"] if type(state) is dict else state[0]
    if type(dtype_name) is not Name or dtype_name not in DTYPES_BY_NAME:
        raise PickleError(f"{name} has a dtype which is not supported")
    dtype, shape = DTYPES_BY_NAME[dtype_name], _read_sizes(fields["size"])
    if type(chunks) is not list or len(chunks) > len(items):
        raise PickleError(f"{name}: has no list of chunks, or more than are stored")
    pieces = []
    for chunk in chunks if 0 not in shape else []:
        position = chunk.fields(f"{CLASSES}.ChunkStorageMetadata")
        region = Region(_read_sizes(position["offsets"]), _read_sizes(position["sizes"]))
        if len(region.offset) != len(shape) or len(region.size) != len(shape):
            raise PickleError(f"{name}: a chunk has other dims than its shape {list(shape)}")
        if (name, region.offset) not in items:
            raise PickleError(f"{name}: the chunk at {list(region.offset)} is not stored")
        piece = StoredPiece(region, *items[name, region.offset])
        if region.volume * dtype.itemsize > piece.length:
            raise PickleError(f"{name}: {piece.length} bytes are stored of the chunk {list(region.size)}")
        pieces.append(piece)
    return StoredTensor(shape, dtype, tuple(pieces))
