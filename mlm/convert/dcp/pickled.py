"""Pickles written by hand, for other libraries to read: plain data, and records of named classes.

Protocol 2, without memo: `read_pickle` of what `write_pickle` wrote gives the same value. Names are text: no
class is imported to write an object of it.
"""

import struct
from collections.abc import Callable
from typing import Any

import torch

from mlm.convert.dcp.unpickled import Name, PersistentId, Record

_BATCH = 1000


def call(name: str, *args: Any) -> Record:
    """Return the call of a class or function."""
    return Record(Name(name), args)


def instance(name: str, state: Any) -> Record:
    """Return an object of a class, made without arguments, with its state: of most classes, its fields."""
    made = Record(Name(name), None)
    made.state = state
    return made


def size(shape: tuple[int, ...]) -> Record:
    """Return a torch.Size."""
    return call("torch.Size", tuple(shape))


def dtype_name(dtype: torch.dtype) -> Name:
    """Return the name of a dtype: torch.float32."""
    return Name(str(dtype))


def write_pickle(value: Any) -> bytes:
    """Return the pickle of None, bool, int, float, str, Name, list, tuple, dict, Record and PersistentId."""
    out = bytearray(b"\x80\x02")
    _write(value, out.extend)
    out += b"."
    return bytes(out)


def _write(value: Any, put: Callable[[bytes], None]) -> None:
    match value:
        case None:
            put(b"N")
        case bool():
            put(b"\x88" if value else b"\x89")
        case int():
            _write_int(value, put)
        case float():
            put(b"G" + struct.pack(">d", value))
        case Name():
            module, _, name = value.rpartition(".")
            put(f"c{module}\n{name}\n".encode())
        case str():
            text = value.encode("utf-8", "surrogatepass")
            put(b"X" + struct.pack("<I", len(text)) + text)
        case tuple():
            _write_items(value, put, b"(")
            put(b"t")
        case list():
            put(b"]")
            for first in range(0, len(value), _BATCH):
                _write_items(value[first : first + _BATCH], put, b"(")
                put(b"e")
        case dict():
            put(b"}")
            pairs = [each for item in value.items() for each in item]
            for first in range(0, len(pairs), _BATCH):
                _write_items(pairs[first : first + _BATCH], put, b"(")
                put(b"u")
        case Record():
            _write_record(value, put)
        case PersistentId():
            _write(value.value, put)
            put(b"Q")
        case _:
            raise TypeError(f"{type(value).__name__} is no plain data")


def _write_items(items: Any, put: Callable[[bytes], None], begin: bytes) -> None:
    put(begin)
    for item in items:
        _write(item, put)


def _write_int(value: int, put: Callable[[bytes], None]) -> None:
    if -(1 << 31) <= value < 1 << 31:
        put(b"J" + struct.pack("<i", value))
        return
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    put(b"\x8a" + bytes([len(digits)]) + digits)


def _write_record(record: Record, put: Callable[[bytes], None]) -> None:
    _write(record.name, put)
    if record.args is None:
        put(b")\x81")
    else:
        _write(record.args, put)
        put(b"R")
    if record.state is not None:
        _write(record.state, put)
        put(b"b")
