"""Scores kept on disk while a long evaluation runs, so that it resumes after a stop.

JSON lines: a header that says what is scored, then one line for each request that is done. A command that is
killed may leave half a line at the end, which is dropped. Any other damage discards the whole file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from mlm.util.atomic import digest_name, write_atomic
from mlm.util.errors import UserError

LONGEST_LINE = 160  # bytes: the keys, two numbers of at most 24 digits, a boolean
Result = tuple[float, bool]
"""Loss in nats, and whether every scored token is the most probable one."""


class Text(Protocol):
    """The fields of a request that determine its score."""

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[n] token ids."""
        ...

    @property
    def first(self) -> int:
        """Index of the first scored token."""
        ...


class KeptScores:
    """File of one evaluation's scores, for one process at a time.

    Attributes:
        found: what an earlier command left, by the request's number.
    """

    def __init__(self, path: Path, identity: str, requests: Sequence[Text]) -> None:
        """Read what is there, and leave a sound file in its place. Raises UserError."""
        self.path = path
        about = {"identity": identity, "requests": digest_requests(requests), "count": len(requests)}
        header = json.dumps({"mlm scores": 1} | about).encode() + b"\n"
        try:
            self.found = read_results(path, header, len(requests))
            write_atomic(path, header + as_lines(self.found))
        except OSError as error:
            raise self._problem(error) from error

    def add(self, results: Mapping[int, Result]) -> None:
        """Append finished requests. Raises UserError."""
        try:
            with open(self.path, "ab") as f:
                f.write(as_lines(results))
        except OSError as error:
            raise self._problem(error) from error

    def _problem(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path}: {error.strerror}: scores are kept here; make room, or set out= to another folder"
        )


def as_lines(results: Mapping[int, Result]) -> bytes:
    """Requests as they are kept; float64 losses are restored exactly."""
    rows = ({"request": n, "loss": loss, "greedy": greedy} for n, (loss, greedy) in results.items())
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read_results(path: Path, header: bytes, count: int) -> dict[int, Result]:
    """Scores kept in a file under this header; none if it is of another evaluation, damaged or missing.

    Raises OSError where it cannot be read.
    """
    if not path.exists() or path.stat().st_size > len(header) + count * LONGEST_LINE:
        return {}
    content = path.read_bytes()
    if not content.startswith(header):
        return {}
    found: dict[int, Result] = {}
    for line in content[len(header) :].split(b"\n")[:-1]:  # what follows the last newline is half a line
        try:
            row = json.loads(line)
            number, loss, greedy = row["request"], row["loss"], row["greedy"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return {}
        kinds = type(number) is int and type(loss) is float and type(greedy) is bool
        if not (kinds and 0 <= number < count and number not in found and math.isfinite(loss)):
            return {}
        found[number] = loss, greedy
    return found


def digest_requests(requests: Sequence[Text]) -> str:
    """Digest of what is scored, in its order."""
    h = xxhash.xxh3_128()
    for request in requests:
        h.update(np.array([len(request.tokens), request.first], dtype="<i8").tobytes())
        h.update(np.ascontiguousarray(request.tokens, dtype="<i8").tobytes())
    return digest_name(h)
