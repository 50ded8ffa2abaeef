"""Files of torch.save, and pickles of PyTorch and Megatron, read as plain data.

A pickle is a program. Only its instructions that build containers and numbers are followed, by Python's own
unpickler. No class or function that it names is imported or called: it stays a `Name`, and a call of one
becomes a `PickleNode` of the name and its arguments.

To hash a tuple that is nested a million deep overflows the stack and ends the process, in `pickle.load` and
`torch.load(weights_only=True)` too. Here no tuple is hashed: keys of few types are kept, and sets are lists.

A file of torch.save is a zip archive: archive/data.pkl holds the value, archive/data/0 the bytes of a
storage, uncompressed. Source: https://github.com/pytorch/pytorch/blob/main/torch/serialization.py.
"""

import io
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch

from mlm.checkpoint.native.format import MAX_DIMS
from mlm.checkpoint.native.shard_file import Stored

DATA = re.compile(
    r"torch\.(\w+Storage|Size|Tensor|device|strided|u?int\d+|b?float\d+\w*|bool|complex\d+)"
    r"|torch\.(storage\.UntypedStorage|nn\.parameter\.Parameter|serialization\._get_layout)"
    r"|torch\._(utils|tensor)\._rebuild_\w+"
    r"|torch\.distributed\._shard\.(metadata|sharded_tensor\.metadata)\.\w+"  # before torch 2.3
    r"|torch\.distributed\.checkpoint\.(metadata|planner|filesystem|_fsspec_filesystem)\.\w+"
    r"|argparse\.Namespace|types\.SimpleNamespace|datetime\.timedelta|signal\.Signals|_?io\.BytesIO"
    r"|collections\.(OrderedDict|defaultdict)|_codecs\.encode|(builtins|__builtin__)\.(set|bytes|bytearray)"
    r"|pathlib\.(_local\.)?(Posix|Pure\w*)?Path"
    r"|numpy\.(_?core\.multiarray\.(_reconstruct|scalar)|ndarray|dtype|dtypes\.\w+DType)"
    r"|(megatron\.(\w+\.)*|fp16\.loss_scaler\.)[A-Z]\w*"  # settings, loss scalers, the re-run state
    r"|megatron\.core\.dist_checkpointing\.[\w.]+",
    re.ASCII,
)
"""Names of classes and functions that such files hold. A pickle that refers to another is rejected."""

MAX_INSTRUCTIONS = 1 << 25
"""Limit for one pickle: enough for a million chunks of tensors, whose objects take 3 GB."""


class PickleError(ValueError):
    """A pickle that is damaged or holds more than data."""


class NotDataError(PickleError):
    """A pickle that refers to a class or function outside of DATA."""


class Name(str):
    """Dotted name of a class or function, which is never imported."""

    __slots__ = ()

    def __call__(self, *args: Any) -> "dict[str, Any] | PickleNode":
        """Return the node of a call; for a dictionary class an empty dict, which is filled later."""
        is_dict = self in ("collections.OrderedDict", "collections.defaultdict")
        return {} if is_dict else PickleNode(self, args)


class PickleNode:
    """A call or an object in a pickle: the name of a class or function, arguments, and the state it sets.

    Compared and hashed by identity: its content may be nested without end.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: Any) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def fields(self, name: str) -> dict[str, Any]:
        """Return the state of an object of the class `name`. Raises PickleError for another class."""
        if self.name != name or type(self.state) is not dict:
            raise PickleError(f"{self.name[:60]} is no {name} with fields")
        return self.state


STORAGE = "storage"
"""Name of the PickleNode for bytes stored outside of the pickle; its arguments are what torch.save wrote."""
_KEYS = (str, bool, bytes, type(None), PickleNode)
"""Types of keys that are kept: an adversary knows the hash of a number, and hashing a tuple would recurse."""
_PROTOCOL_2_TO_5 = b"(N\x88\x89JKM\x8aGX\x8c\x8dCB]})t\x85\x86\x87c\x93RQhj\x80\x95.0qr\x94ae"
"""Instructions run as they are. A dictionary's entries, states, sets and objects have methods below."""
_USUAL = vars(pickle._Unpickler)["dispatch"]


class _Instructions(dict[int, Any]):
    """Code of an instruction -> its method; limits the instructions of one pickle."""

    def __init__(self, usual: dict[int, Any]) -> None:
        super().__init__(usual)
        self.left = MAX_INSTRUCTIONS

    def __getitem__(self, code: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise PickleError(f"more than {MAX_INSTRUCTIONS} instructions")
        return super().__getitem__(code)


class _Unpickler(pickle._Unpickler):
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.dispatch = _Instructions(self.instructions)  # type: ignore[misc]

    def find_class(self, module: str, name: str) -> Name:
        full = f"{module}.{name}"
        if not DATA.fullmatch(full):
            raise NotDataError(f"refers to {ascii(full)[1:-1][:120]}, which is not data")
        return Name(full)

    def persistent_load(self, pid: Any) -> PickleNode:
        return PickleNode(STORAGE, pid)

    def put_items(self) -> None:
        items = self.pop_mark()
        pairs = zip(items[::2], items[1::2], strict=True)
        self.stack[-1].update((key, value) for key, value in pairs if type(key) in _KEYS)

    def put_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        if type(key) in _KEYS:
            self.stack[-1][key] = value

    def set_state(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is PickleNode:  # attributes of a dictionary are not kept
            self.stack[-1].state = state

    instructions = {code: _USUAL[code] for code in _PROTOCOL_2_TO_5} | {
        pickle.SETITEMS[0]: put_items,
        pickle.SETITEM[0]: put_item,
        pickle.BUILD[0]: set_state,
        pickle.NEWOBJ[0]: _USUAL[pickle.REDUCE[0]],
        # Sets as lists: hashing their items could recurse.
        pickle.EMPTY_SET[0]: _USUAL[pickle.EMPTY_LIST[0]],
        pickle.ADDITEMS[0]: _USUAL[pickle.APPENDS[0]],
        pickle.FROZENSET[0]: _USUAL[pickle.TUPLE[0]],
    }


def read_pickle(content: bytes) -> Any:
    """Return the value of a pickle: None, bool, int, float, str, bytes, list, dict, tuple, Name, PickleNode.

    Entries of a dict whose keys are numbers or tuples are left out. Raises PickleError.
    """
    try:
        return _Unpickler(content).load()
    except PickleError:
        raise
    except Exception as error:  # an adversary's instructions may raise any
        raise PickleError(f"is no pickle of data ({type(error).__name__})") from error


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
class SavedFile:
    """A value of torch.save; its tensors are records to `find`."""

    value: Any
    storages: Mapping[str, tuple[int, int]]
    """Key -> first byte in the file, and bytes."""

    def find(self, tensor: Any) -> Stored:
        """Return the location of a tensor in the file. Raises one of DAMAGES.

        It must be contiguous and entirely in the file: strides could turn a few bytes into any size.
        """
        if type(tensor) is PickleNode and tensor.name == "torch._tensor._rebuild_from_type_v2":
            tensor = PickleNode(*tensor.args[0:3:2])  # a tensor with attributes
        while type(tensor) is PickleNode and tensor.name.startswith("torch._utils._rebuild_parameter"):
            tensor = tensor.args[0]
        if type(tensor) is not PickleNode or tensor.name != REBUILD:
            raise PickleError("describes no plain tensor")
        storage, first, shape, strides = tensor.args[:4]
        if type(storage) is not PickleNode or storage.name != STORAGE:
            raise PickleError("describes no plain tensor")
        _, kind, key, *_ = storage.args
        if not isinstance(kind, str) or type(key) is not str:  # hashing a tuple would recurse
            raise PickleError("describes no plain tensor")
        dtype, (begin, stored_bytes) = DTYPES[kind], self.storages[key]
        if len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in (first, *shape)):
            raise PickleError("has an impossible shape")
        contiguous = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        if any(n > 1 and a != b for n, a, b in zip(shape, strides, contiguous, strict=True)):
            raise PickleError(f"is no contiguous tensor of {list(shape)}")
        needed = (first + prod(shape)) * dtype.itemsize
        if needed > stored_bytes:
            raise PickleError(f"needs {needed} bytes, {stored_bytes} are stored")
        return Stored(dtype, shape, begin + first * dtype.itemsize)


def check_archive(f: BinaryIO) -> None:
    """Compare every record of an archive with its checksum. Raises one of DAMAGES."""
    with zipfile.ZipFile(f) as records:
        if (damaged := records.testzip()) is not None:
            raise zipfile.BadZipFile(f"bad CRC of {damaged}")


def read_archive(f: BinaryIO) -> SavedFile:
    """Read the value of an archive. Raises one of DAMAGES."""
    with zipfile.ZipFile(f) as records:
        # Storages are read in place, so compressed ones would give wrong numbers.
        if any(info.compress_type != zipfile.ZIP_STORED for info in records.infolist()):
            raise zipfile.BadZipFile("is compressed, which torch.save never does")
        names = [name for name in records.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1 or records.getinfo(names[0]).file_size > MAX_PICKLE_BYTES:
            raise PickleError(f"has no description, or one of more than {MAX_PICKLE_BYTES} bytes")
        prefix, storages = names[0].removesuffix("data.pkl"), {}
        if f"{prefix}byteorder" in records.namelist() and records.read(f"{prefix}byteorder") != b"little":
            raise PickleError("is big-endian, which is not supported")
        for info in records.infolist():
            if info.filename.startswith(f"{prefix}data/"):
                with records.open(info):  # leaves the file at the record's first byte
                    storages[info.filename.rpartition("/")[2]] = f.tell(), info.file_size
        return SavedFile(read_pickle(records.read(names[0])), storages)
