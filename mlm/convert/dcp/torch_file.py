"""Files of torch.save, read as plain data: the value, and the location of each tensor's bytes.

Since torch 1.6 that is a zip archive: archive/data.pkl holds the value, archive/data/0 the bytes of a
storage, uncompressed. Before, five pickles lie end to end (a magic number, the protocol, the machine, the
value, the keys of the storages), then each storage: its elements counted as i64, and its bytes.
Source: https://github.com/pytorch/pytorch/blob/main/torch/serialization.py.
"""

import io
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch

from mlm.checkpoint.native.format import MAX_DIMS
from mlm.checkpoint.native.shard_file import Stored
from mlm.convert.dcp.unpickled import Name, PersistentId, PickleError, Record, read_pickle, read_pickles

MAX_PICKLE_BYTES = 1 << 28
ZIP_MAGIC = b"PK\x03\x04"
MAGIC = 0x1950A86A20F9469CFC6C
"""The first pickle of the format before 1.6."""
STORAGES = {
    torch.float32: "FloatStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.float16: "HalfStorage",
    torch.float64: "DoubleStorage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}
"""dtype -> class of torch that a tensor's description names."""
DTYPES = {f"torch.{name}": dtype for dtype, name in STORAGES.items()}
REBUILD = "torch._utils._rebuild_tensor_v2"
DAMAGES = (
    *(zipfile.BadZipFile, struct.error, EOFError, RuntimeError),
    *(LookupError, AttributeError, TypeError, ValueError),
)
"""Errors of a damaged file; a PickleError is a ValueError."""
IsData = Callable[[str], bool]


class Window(io.RawIOBase):
    """The bytes from `begin` on of a seekable file, `length` at most, as a file."""

    def __init__(self, f: BinaryIO, begin: int, length: int | None = None) -> None:
        self.f, self.begin, self.length, self.position = f, begin, length, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return True for one without an end."""
        return self.length is None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the place of the next read or write."""
        end = self.length if self.length is not None else self.f.seek(0, os.SEEK_END) - self.begin
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: end}[whence]
        if base + offset < 0:
            raise OSError("seek before the beginning")
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        """Return the place of the next read or write."""
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as the window goes."""
        left = len(buffer) if self.length is None else max(0, min(len(buffer), self.length - self.position))
        self.f.seek(self.begin + self.position)
        count = int(self.f.readinto(memoryview(buffer)[:left]))  # type: ignore[attr-defined]
        self.position += count
        return count

    def write(self, content: Any) -> int:
        """Write all of `content`."""
        self.f.seek(self.begin + self.position)
        self.f.write(content)
        self.position += len(content)
        return len(content)


@dataclass(frozen=True)
class Saved:
    """A value of torch.save; its tensors are records to `find`."""

    value: Any
    storages: Mapping[str, tuple[int, int]]
    """Key -> first byte in the file, and bytes."""

    def find(self, tensor: Any) -> Stored:
        """Return where a tensor of the value lies in the file. Raises one of DAMAGES.

        A tensor is contiguous, and all of it in the file: strides could make a few bytes one of any size.
        """
        if type(tensor) is Record and tensor.name == "torch._tensor._rebuild_from_type_v2":
            tensor = Record(*tensor.args[0:3:2])  # one that has attributes
        while type(tensor) is Record and tensor.name.startswith("torch._utils._rebuild_parameter"):
            tensor = tensor.args[0]
        if type(tensor) is not Record or tensor.name != REBUILD:
            raise PickleError("describes no plain tensor")
        storage, first, shape, strides = tensor.args[:4]
        dtype, (begin, held) = _dtype(storage), self.storages[storage.value[2]]
        if type(shape) is not tuple or len(shape) > MAX_DIMS:
            raise PickleError(f"has a shape that is no list of at most {MAX_DIMS} numbers")
        if any(type(n) is not int or n < 0 for n in (first, *shape)):
            raise PickleError("has an impossible shape")
        contiguous = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        if any(n > 1 and a != b for n, a, b in zip(shape, strides, contiguous, strict=True)):
            raise PickleError(f"is no contiguous tensor of {list(shape)}")
        needed = (first + prod(shape)) * dtype.itemsize
        if needed > held:
            raise PickleError(f"needs {needed} bytes, {held} are stored")
        return Stored(dtype, shape, begin + first * dtype.itemsize)


def _dtype(storage: Any) -> torch.dtype:
    """Return the dtype of the storage that a reference names."""
    _, kind, key, *_ = storage.value if type(storage) is PersistentId else (None, None, None)
    if type(kind) is not Name or type(key) is not str:  # to hash a tuple would recurse
        raise PickleError("describes no plain tensor")
    return DTYPES[kind]


def open_archive(f: BinaryIO) -> zipfile.ZipFile:
    """Open a zip archive of torch.save, in which nothing is compressed. Raises one of DAMAGES."""
    records = zipfile.ZipFile(f)
    if any(info.compress_type != zipfile.ZIP_STORED for info in records.infolist()):
        raise zipfile.BadZipFile("is compressed, which torch.save never does")
    return records


def read_archive(f: BinaryIO, is_data: IsData) -> Saved:
    """Read an archive whose value may refer to names for which `is_data`. Raises one of DAMAGES."""
    with open_archive(f) as records:
        names = [name for name in records.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1 or records.getinfo(names[0]).file_size > MAX_PICKLE_BYTES:
            raise PickleError(f"has no description, or one of more than {MAX_PICKLE_BYTES} bytes")
        prefix = names[0].removesuffix("data.pkl")
        if f"{prefix}byteorder" in records.namelist() and records.read(f"{prefix}byteorder") != b"little":
            raise PickleError("is big-endian, which is not supported")
        value = read_pickle(records.read(names[0]), is_data)
        held = [info for info in records.infolist() if info.filename.startswith(f"{prefix}data/")]
    return Saved(value, {info.filename.rpartition("/")[2]: _place(f, info) for info in held})


def _place(f: BinaryIO, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Return first byte and bytes of a record."""
    f.seek(info.header_offset)
    header = f.read(30)
    if len(header) < 30 or header[:4] != ZIP_MAGIC:
        raise PickleError("has no record where its directory puts it")
    begin = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
    if begin + info.file_size > f.seek(0, os.SEEK_END) or info.file_size != info.compress_size:
        raise PickleError("ends beyond its file")
    return begin, info.file_size


def read_old_file(f: BinaryIO, is_data: IsData) -> Saved:
    """Read a file of the format before torch 1.6, as `read_archive`."""
    f.seek(0)
    values, references, at = read_pickles(f.read(MAX_PICKLE_BYTES), 5, is_data)
    magic, _, _, value, keys = values
    if magic != MAGIC or type(keys) is not list:
        raise PickleError("begins otherwise")
    itemsizes = {each.value[2]: _dtype(each).itemsize for each in references}
    storages = {}
    for key in keys:
        if type(key) is not str:
            raise PickleError("a storage has no name")
        f.seek(at)
        begin, held = at + 8, int.from_bytes(f.read(8), "little") * itemsizes[key]
        storages[key], at = (begin, held), begin + held
    if at > f.seek(0, os.SEEK_END):
        raise PickleError("ends early")
    return Saved(value, storages)
