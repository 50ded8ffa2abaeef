"""Tensors of a DCP folder, read by slices: an item's bytes are found, never unpickled.

An item is a zip archive of torch.save: archive/data.pkl describes the tensor, archive/data/0 holds its bytes,
uncompressed. The description is read as plain data.
"""

import io
import os
import re
import struct
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mlm.checkpoint.dcp.metadata import COPY_AGAIN, StoredPiece, StoredTensor
from mlm.checkpoint.dcp.unpickled import PersistentId, PickleError, Record, read_pickle
from mlm.checkpoint.native.reader import copy_region
from mlm.checkpoint.native.shard_file import Stored
from mlm.checkpoint.native.slices import Region
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import digest_file

OPEN_FILES = 64
MAX_PICKLE_BYTES = 1 << 20
"""Of the description of one tensor."""
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
"""dtype -> class of torch that a description names."""
REBUILD = "torch._utils._rebuild_tensor_v2"
_DAMAGES = (zipfile.BadZipFile, struct.error, EOFError, RuntimeError, LookupError, ValueError, OSError)
"""What the reader of an archive raises; a PickleError is a ValueError."""
_DATA = re.compile(
    r"torch\.\w+Storage|torch\._utils\._rebuild_(tensor_v2|parameter)|collections\.OrderedDict"
)


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


class DCPReader:
    """Reads any region of any tensor of a folder. A context manager: leaving it closes the files.

    Methods raise CorruptFileError, and UserError where a file cannot be read.
    """

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.folder, self.tensors = folder, tensors
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> "DCPReader":
        return self

    def __exit__(self, *exception: object) -> None:
        for f in self._open.values():
            f.close()
        self._open.clear()

    @property
    def files(self) -> list[str]:
        """Names of the files that hold the tensors."""
        return sorted({piece.file for tensor in self.tensors.values() for piece in tensor.pieces})

    def read(self, name: str, region: Region, dtype: torch.dtype | None = None) -> Tensor:
        """Return those elements, on the CPU, in `dtype`, by default the stored one."""
        tensor = self.tensors[name]
        target = torch.empty(region.size, dtype=dtype or tensor.dtype)
        for piece in tensor.pieces:
            if common := region.intersect(piece.region):
                f = self._file(piece.file)
                stored = self._find(name, tensor.dtype, piece)
                copy_region(f, stored, common, piece.region, target[common.within(region)])
        return target

    def verify(self, progress: Callable[[int], None] = lambda count: None) -> dict[str, str]:
        """Compare every item with its checksums; return the digest of each file by its name."""
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                try:
                    with self._archive(piece) as records:
                        damaged = records.testzip()
                except _DAMAGES as error:
                    raise self._damaged(name, piece, str(error)) from error
                if damaged is not None:
                    raise self._damaged(name, piece, f"bad CRC of {damaged[:60]}")
        try:
            return {file: digest_file(self.folder / file, progress) for file in self.files}
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}: {COPY_AGAIN}") from error

    def _find(self, name: str, dtype: torch.dtype, piece: StoredPiece) -> Stored:
        """Return where the bytes of a piece lie in its file."""
        try:
            with self._archive(piece) as records:
                return _stored(records, self._file(piece.file), dtype, piece)
        except _DAMAGES as error:
            raise self._damaged(name, piece, str(error)) from error

    def _archive(self, piece: StoredPiece) -> zipfile.ZipFile:
        window = Window(self._file(piece.file), piece.begin, piece.length)
        records = zipfile.ZipFile(io.BufferedReader(window, 1 << 16))
        for info in records.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise zipfile.BadZipFile("is compressed, which torch.save never does")
        return records

    def _damaged(self, name: str, piece: StoredPiece, why: str) -> CorruptFileError:
        path = self.folder / piece.file
        reason = (why if why.isprintable() else ascii(why))[:120]
        return CorruptFileError(
            f"{path}: the item at byte {piece.begin} holds no plain {name} ({reason}); nothing was executed: "
            f"{COPY_AGAIN}"
        )

    def _file(self, name: str) -> BinaryIO:
        if name not in self._open:
            if len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            try:
                self._open[name] = open(self.folder / name, "rb", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise UserError(f"{error.filename}: {error.strerror}: {COPY_AGAIN}") from error
        return self._open[name]


def _stored(records: zipfile.ZipFile, f: BinaryIO, dtype: torch.dtype, piece: StoredPiece) -> Stored:
    names = [name for name in records.namelist() if name.endswith("/data.pkl")]
    if len(names) != 1 or records.getinfo(names[0]).file_size > MAX_PICKLE_BYTES:
        raise PickleError("has no description, or one of more than 1 MiB")
    prefix = names[0].removesuffix("data.pkl")
    if f"{prefix}byteorder" in records.namelist() and records.read(f"{prefix}byteorder") != b"little":
        raise PickleError("is big-endian, which is not supported")
    key, begin = _described(read_pickle(records.read(names[0]), _is_data), dtype, piece.region.size)
    info = records.getinfo(f"{prefix}data/{key}")
    num_bytes = prod(piece.region.size) * dtype.itemsize
    if begin * dtype.itemsize + num_bytes > info.file_size:
        raise PickleError(f"needs {num_bytes} bytes, {info.file_size} are stored")
    at = piece.begin + info.header_offset
    f.seek(at)
    header = f.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise PickleError("has no record where its directory puts it")
    at += 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if at + info.file_size > piece.begin + piece.length:
        raise PickleError("ends beyond its item")
    return Stored(dtype, piece.region.size, at + begin * dtype.itemsize)


def _is_data(name: str) -> bool:
    return _DATA.fullmatch(name) is not None


def _described(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, int]:
    """Return the key of a tensor's storage and the first element in it."""
    if type(value) is Record and value.name.endswith("_rebuild_parameter"):
        value = value.args[0] if value.args else None
    if type(value) is not Record or value.name != REBUILD or len(value.args) < 4:
        raise PickleError("describes no plain tensor")
    storage, begin, size, stride = value.args[:4]
    place = storage.value if type(storage) is PersistentId else None
    if type(place) is not tuple or len(place) != 5 or place[1] != f"torch.{STORAGES.get(dtype)}":
        raise PickleError(f"is not of {dtype}, as .metadata lists it")
    if type(begin) is not int or begin < 0 or type(stride) is not tuple or len(stride) != len(shape):
        raise PickleError("begins outside of its storage")
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if size != shape or any(n > 1 and a != b for n, a, b in zip(shape, stride, strides, strict=True)):
        raise PickleError(f"is no contiguous tensor of {list(shape)}, as .metadata lists it")
    return str(place[2]), begin
