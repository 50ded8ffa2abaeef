"""Files of others, read with their size compared first, and JSON that cannot overflow what reads it."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from mlm.errors import CorruptFileError

LARGEST = 1 << 64  # a whole number beyond is none of ours; Python would compute with it for ever


def read_bounded(path: Path, most: int, remedy: str) -> bytes:
    """The content of a regular file of at most `most` bytes; a larger one, a pipe or a device is not read.

    Raises CorruptFileError, which ends in `remedy`, and OSError.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as f:
        found = os.fstat(f.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise CorruptFileError(f"{path}: no plain file; {remedy}")
        if found.st_size > most:
            raise CorruptFileError(f"{path}: {found.st_size} bytes, {most} is the limit; {remedy}")
        return f.read(most + 1)


def parse_json(content: bytes | str, *, finite: bool = True) -> Any:
    """JSON as RFC 8259 has it: finite numbers, whole ones below 2^64, each key once in an object.

    Python's writers say NaN and Infinity too: with `finite=False` they are numbers. Raises ValueError for
    anything else, brackets too deep among it.
    """
    try:
        return json.loads(
            content,
            parse_int=_whole_number,
            parse_float=_finite,
            parse_constant=_refuse_constant if finite else float,
            object_pairs_hook=without_repeats,
        )
    except RecursionError:
        raise ValueError("its brackets nest too deeply") from None


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; one that says a key twice means different things to different readers.

    Raises ValueError.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _whole_number(digits: str) -> int:
    if len(digits) > 20 or abs(number := int(digits)) >= LARGEST:
        raise ValueError(f"the number {digits[:20]}… is too large")
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if number - number != 0:
        raise ValueError(f"the number {digits[:20]} is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
