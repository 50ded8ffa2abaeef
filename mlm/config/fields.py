"""Metadata of config fields, declared in annotations: bounds, conditions, purposes of paths, other names.

A field is annotated `Annotated[int, POSITIVE]`, `InputPath | None` or `Annotated[int, Aliases("n_layer")]`.
`build.py` checks bounds and paths, and expands `~`; `suggest.py` uses the other names.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from mlm.util.errors import ConfigError, Problem, format_value, type_of
from mlm.util.object_store import url_problem
from mlm.util.ownership import file_type_name, read_obstacle

M = TypeVar("M")


Options = dict[str, bool | int | float | str]
"""Settings by name, for user code."""
ObserverEntry = str | Options
"""An import path, or its fields by name with the path as `use`."""
Columns = dict[str, str]
"""Names in a file, by the names that are read."""

REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
"""s3://…, gs://…, https://…, hf://…"""
STORED = re.compile(r"s3:", re.IGNORECASE)
"""Beginning of an object's URL, or of an attempt at one."""
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of Linux
MOST = 2**31 - 1
"""Limit of integers other than seeds and bytes: a larger one is a typing error."""


def exact(value: float) -> Fraction:
    """Return the decimal fraction that a float was typed as: 11/10 for 1.1."""
    return Fraction(repr(float(value)))


@dataclass(frozen=True)
class Bound:
    """A condition on a number, or on each number of a list."""

    holds: Callable[[float], bool]
    words: str
    """The condition, as it follows `must be`."""
    most: int | None = MOST
    """Limit of whole numbers."""

    def problem(self, key: str, value: Any) -> Problem | None:
        """The problem of a number outside the bound; None for other values, such as null."""
        numbers = value if isinstance(value, list | tuple) else [value]
        numbers = [number for number in numbers if isinstance(number, int | float)]
        if not all(map(self.holds, numbers)):
            return Problem((key,), f"{key}={format_value(value)} must be {self.words}")
        if self.most is not None and any(isinstance(n, int) and n > self.most for n in numbers):
            return Problem((key,), f"{key}={format_value(value)} must be at most {self.most}")
        return None


POSITIVE = Bound(lambda x: x > 0, "greater than 0")
EXTENT = Bound(lambda x: x > 0, "greater than 0", most=2**20)
"""Layers, heads and widths of a model: no product of two with a vocabulary overflows a tensor's size."""
NOT_NEGATIVE = Bound(lambda x: x >= 0, "0 or more")
SECONDS = Bound(lambda x: 0 < x <= 1e9, "greater than 0 and at most 1e9")
"""Range of clocks and sockets: 1e9 seconds are 31 years."""
FRACTION = Bound(lambda x: 0 <= x < 1, "at least 0 and below 1")
PROBABILITY = Bound(lambda x: 0 < x <= 1, "above 0 and at most 1")
SHARE = Bound(lambda x: 0 <= x <= 1, "from 0 to 1")
PORT = Bound(lambda x: 0 <= x < 65536, "0 (any free port) to 65535")
SEED = Bound(lambda x: 0 <= x < 2**63, "0 to 2**63 - 1", most=None)
MANY = Bound(lambda x: x > 0, "greater than 0", most=None)


class Aliases:
    """Names of a field in other programs, in lower case with underscores.

    nanoGPT and minGPT, flags of Megatron-LM and DeepSpeed, configurations and TrainingArguments of
    `transformers`.
    """

    def __init__(self, *names: str) -> None:
        self.names = names


class OnlyIf:
    """Condition under which a field is read; typing it otherwise is an error.

    `key`, in the same section or in full with its dot, must be read itself, and have one of `values` (fnmatch
    patterns), by default any but null, 0, false and empty. With `or_null`, null is such a value.
    """

    def __init__(self, key: str, *values: object, or_null: bool = False) -> None:
        self.key, self.values, self.or_null = key, values, or_null

    def within(self, prefix: str) -> "OnlyIf":
        """The condition with its full key, for a field whose section has the prefix `prefix`."""
        return self if "." in self.key else OnlyIf(prefix + self.key, *self.values, or_null=self.or_null)

    def holds(self, value: Any) -> bool:
        """True if the field is read at this value of the key."""
        if value is None and self.or_null:
            return True
        return any(fnmatchcase(str(value), str(v)) for v in self.values) if self.values else bool(value)


class ImportPath:
    """Marks a field that takes one of the `shipped` names, or an import path."""

    def __init__(self, *shipped: str) -> None:
        self.shipped = shipped


class Role(Enum):
    """Purpose of a path."""

    INPUT = "read"
    """A file, folder, glob or prefix to read; or the id of a model or dataset on the Hub."""
    STORED = "read, from an object store too"
    """As INPUT, or s3://BUCKET/NAME."""
    BLEND = "read, after a weight"
    """`0.3 corpora/wiki`, or the path alone; as STORED."""
    STORE = "a folder of an object store to write"
    """s3://BUCKET/NAME."""
    RESULT = "a file to write"
    """`-` is standard output."""
    PLACE = "a file to write, or the folder to write it in"
    FOLDER = "a folder to write"
    CACHE = "a folder to keep files in that can be made again"


READ = (Role.INPUT, Role.STORED, Role.BLEND)


OUT_NAMES = Aliases("out_dir", "output_dir", "save", "save_dir")
"""Other programs' names for the path that a command writes."""

InputPath = Annotated[str, Role.INPUT]
CHECKPOINT_NAMES = Aliases("checkpoint", "load", "load_dir", "model_name_or_path", "pretrained")
CheckpointPath = Annotated[str, Role.INPUT, CHECKPOINT_NAMES]
StoredCheckpoint = Annotated[str, Role.STORED, CHECKPOINT_NAMES]
BlendEntry = Annotated[str, Role.BLEND]
ResultFile = Annotated[str, Role.RESULT, OUT_NAMES]
OutPlace = Annotated[str, Role.PLACE, OUT_NAMES]
OutFolder = Annotated[str, Role.FOLDER, OUT_NAMES]
CacheFolder = Annotated[str, Role.CACHE]
StoreFolder = Annotated[str, Role.STORE]


def metadata(annotation: Any, kind: type[M]) -> M | None:
    """The metadata of type `kind` in an annotation such as `InputPath | None`; None without it."""
    if isinstance(annotation, kind):
        return annotation
    for inner in (*getattr(annotation, "__metadata__", ()), *get_args(annotation)):
        if (item := metadata(inner, kind)) is not None:
            return item
    return None


def expanded(value: Any, role: Role) -> Any:
    """A typed path with `~` and `~user` replaced by the home folder, in lists too."""
    if isinstance(value, list | tuple):
        return [expanded(item, role) for item in value]
    if not isinstance(value, str):
        return value
    weight, path = split_weight(value) if role is Role.BLEND else ("", value)
    return weight + expand_home(path)


def expand_home(path: str) -> str:
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        return path


def path_problem(key: str, value: Any, role: Role) -> Problem | None:
    """The problem of an expanded path: empty, too long, an unknown home, or unreadable."""
    if isinstance(value, list | tuple):
        return next((problem for item in value if (problem := path_problem(key, item, role))), None)
    if not isinstance(value, str):
        return None
    path = split_weight(value)[1] if role is Role.BLEND else value
    if not path.strip() and role is not Role.BLEND:  # blend_checks.py names the entry
        return Problem((key,), f"{key}= is empty", "name a path, or omit the key")
    if path.startswith("~"):
        user = path.partition("/")[0]
        fix = f"write the path in full, or ./{path}"
        return Problem.at(key, value, f"{user} is no user's home folder", fix)
    if role is Role.STORE or (role in (Role.STORED, Role.BLEND) and STORED.match(path)):
        return url_problem(key, path)
    if REMOTE.match(path):
        fix = "copy it to this machine, or mount it, and name that path"
        return Problem.at(key, value, "not read from or written to a remote store", fix)
    if "\0" in path:
        return Problem((key,), f"{key}={value!r}: holds a null byte", "correct the path")
    longest = max((len(os.fsencode(name)) for name in path.split("/")), default=0)
    if longest > LONGEST_NAME or len(os.fsencode(path)) > LONGEST_PATH:  # looking for it would end in OSError
        too_long = f"a name of {longest} bytes is too long for a file system"
        return Problem.at(key, f"{path[:40]}…", too_long, "shorten it")
    kind = file_type_name(Path(path))
    if kind == "a loop of links":
        return Problem.at(key, path, f"leads through {kind}", "correct the links, or name another path")
    if role not in READ:  # the writer checks its paths
        return None
    if kind in ("a FIFO", "a socket", "a device"):
        return Problem.at(key, path, f"is {kind}", "name a file or a folder")
    reason = read_obstacle(path)
    return Problem.at(key, path, reason, "ask for the right to read it, or name another") if reason else None


def path_argument(key: str, value: object, role: Role = Role.INPUT) -> str:
    """An argument of the public API as a path, `~` expanded. Raises TypeError, ConfigError."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"{key}: {type_of(path)}, not a path; pass a str or a Path")
    path = expand_home(path)
    if problem := path_problem(key, path, role):
        raise ConfigError([problem])
    return path


def split_weight(entry: str) -> tuple[str, str]:
    """`0.3 corpora/wiki` as "0.3 " and the path."""
    text = entry.lstrip()
    weight, space, path = text.partition(" ")
    try:
        float(weight)
    except ValueError:
        return "", entry
    return f"{weight}{space}", path.lstrip()
