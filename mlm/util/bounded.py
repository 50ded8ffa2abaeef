"""Reading of untrusted files: bounded size, and strict JSON with bounded numbers."""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mlm.util.errors import CorruptFileError

LARGEST = 1 << 64  # none of our numbers is larger; Python would compute with it for ever
MOST_DIGITS = 300
"""Digits of a whole number of another program: transformers writes 1e30 for a length without a limit."""


def read_bounded(path: Path, most: int, remedy: str) -> bytes:
    """Read a regular file of at most `most` bytes; a larger one, a pipe or a device is not read.

    Raises CorruptFileError, which ends in `remedy`, and OSError.
    """
    with open_bounded(path, most, remedy) as f:
        return f.read(most + 1)


def open_bounded(path: Path, most: int, remedy: str) -> BinaryIO:
    """Open a file to read under the conditions of `read_bounded`."""
    f = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 (the caller's)
    found = os.fstat(f.fileno())
    problem = None
    if not stat.S_ISREG(found.st_mode):
        problem = "not a regular file"
    elif found.st_size > most:
        problem = f"{found.st_size} bytes, {most} is the limit"
    if problem is not None:
        f.close()
        raise CorruptFileError(f"{path}: {problem}; {remedy}")
    return f


def parse_json(content: bytes | str, *, foreign: bool = False) -> Any:
    """Parse JSON as in RFC 8259: finite numbers, integers below 2^64, each key once in an object.

    In a file of another program (`foreign`) NaN and Infinity, which Python writes, are numbers too, and
    integers have up to MOST_DIGITS digits. Raises ValueError for anything else, including brackets that nest
    too deeply.
    """
    try:
        return json.loads(
            content,
            parse_int=_foreign_number if foreign else _whole_number,
            parse_float=float if foreign else _finite,
            parse_constant=float if foreign else _refuse_constant,
            object_pairs_hook=without_repeats,
        )
    except RecursionError:
        raise ValueError("its brackets nest too deeply") from None


def as_json(values: Mapping[str, Any]) -> bytes:
    """Return indented JSON with a line end, as results and receipts are written."""
    return (json.dumps(values, indent=2) + "\n").encode()


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; a key twice means different things to different readers.

    Raises ValueError.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _whole_number(digits: str) -> int:
    if len(digits) > 20 or abs(number := int(digits)) >= LARGEST:
        raise ValueError(f"the number {digits[:20]}… is too large")
    return number


def _foreign_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"the number {digits[:20]}… has more than {MOST_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if number - number != 0:
        raise ValueError(f"the number {digits[:20]} is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
