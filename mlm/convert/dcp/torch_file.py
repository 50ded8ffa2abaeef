"""Files of torch.save, read as plain data: the value, and the location of each tensor's bytes.

Such a file is a zip archive: archive/data.pkl holds the value, archive/data/0 the bytes of a storage,
uncompressed. Source: https://github.com/pytorch/pytorch/blob/main/torch/serialization.py.
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch

from mlm.checkpoint.native.format import MAX_DIMS
from mlm.checkpoint.native.shard_file import Stored
from mlm.convert.dcp.unpickled import STORAGE, PickleError, Record, read_pickle

MAX_PICKLE_BYTES = 1 << 28
DTYPES = {
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
"""Class that the reference to a storage names -> dtype."""
REBUILD = "torch._utils._rebuild_tensor_v2"
DAMAGES = (
    *(zipfile.BadZipFile, EOFError, RuntimeError, MemoryError),
    *(LookupError, AttributeError, TypeError, ValueError),
)
"""Errors of a damaged file; a PickleError is a ValueError."""


@dataclass(frozen=True)
class Saved:
    """A value of torch.save; its tensors are records to `find`."""

    value: Any
    storages: Mapping[str, tuple[int, int]]
    """Key -> first byte in the file, and bytes."""

    def find(self, tensor: Any) -> Stored:
        """Return where a tensor of the value is in the file. Raises one of DAMAGES.

        It must be contiguous, and all of it in the file: strides could turn a few bytes into any size.
        """
        if type(tensor) is Record and tensor.name == "torch._tensor._rebuild_from_type_v2":
            tensor = Record(*tensor.args[0:3:2])  # a tensor with attributes
        while type(tensor) is Record and tensor.name.startswith("torch._utils._rebuild_parameter"):
            tensor = tensor.args[0]
        if type(tensor) is not Record or tensor.name != REBUILD:
            raise PickleError("describes no plain tensor")
        storage, first, shape, strides = tensor.args[:4]
        _, kind, key, *_ = storage.args if type(storage) is Record and storage.name == STORAGE else 3 * [None]
        if not isinstance(kind, str) or type(key) is not str:  # hashing a tuple would recurse
            raise PickleError("describes no plain tensor")
        dtype, (begin, held) = DTYPES[kind], self.storages[key]
        if len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in (first, *shape)):
            raise PickleError("has an impossible shape")
        contiguous = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        if any(n > 1 and a != b for n, a, b in zip(shape, strides, contiguous, strict=True)):
            raise PickleError(f"is no contiguous tensor of {list(shape)}")
        needed = (first + prod(shape)) * dtype.itemsize
        if needed > held:
            raise PickleError(f"needs {needed} bytes, {held} are stored")
        return Stored(dtype, shape, begin + first * dtype.itemsize)


def check_archive(f: BinaryIO) -> None:
    """Compare every record of an archive with its checksum. Raises one of DAMAGES."""
    with zipfile.ZipFile(f) as records:
        if (damaged := records.testzip()) is not None:
            raise zipfile.BadZipFile(f"bad CRC of {damaged}")


def read_archive(f: BinaryIO) -> Saved:
    """Read the value of an archive. Raises one of DAMAGES."""
    with zipfile.ZipFile(f) as records:
        # Storages are read as they lie in the file, so that compressed ones would be other numbers.
        if any(info.compress_type != zipfile.ZIP_STORED for info in records.infolist()):
            raise zipfile.BadZipFile("is compressed, which torch.save never does")
        names = [name for name in records.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1 or records.getinfo(names[0]).file_size > MAX_PICKLE_BYTES:
            raise PickleError(f"has no description, or one of more than {MAX_PICKLE_BYTES} bytes")
        prefix, storages = names[0].removesuffix("data.pkl"), {}
        for info in records.infolist():
            if info.filename.startswith(f"{prefix}data/"):
                with records.open(info):  # leaves the file at the record's first byte
                    storages[info.filename.rpartition("/")[2]] = f.tell(), info.file_size
        return Saved(read_pickle(records.read(names[0])), storages)
