"""Metadata of config fields, declared in annotations: bounds, conditions, purposes of paths, other names.

A field is annotated `Annotated[int, POSITIVE]`, `InputPath | None` or `Annotated[int, Aliases("n_layer")]`.
`build.py` checks bounds, expands `~`, rejects empty paths and looks at what exists at a path; `suggest.py`
knows the other names.
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
"""Settings by name, for the user's code."""
ObserverEntry = str | Options
"""An import path, or its fields by name with the path as `use`."""
Columns = dict[str, str]
"""Names in a file, by the names that are read."""

REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
"""s3://…, gs://…, https://…, hf://…"""
STORED = re.compile(r"s3:", re.IGNORECASE)
"""Begins the URL of an object, or what was meant to be one."""
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of Linux
MOST = 2**31 - 1
"""Limit of whole numbers other than seeds and bytes: more is a slip of a finger."""


def exact(value: float) -> Fraction:
    """Return the decimal fraction that a float was typed as: 11/10 of 1.1, whose value is a little more."""
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
        """The problem of a value outside the bound. Other values than numbers, such as null, have none."""
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
"""Within what clocks and sockets can count: 1e9 seconds are 31 years."""
FRACTION = Bound(lambda x: 0 <= x < 1, "at least 0 and below 1")
PROBABILITY = Bound(lambda x: 0 < x <= 1, "above 0 and at most 1")
SHARE = Bound(lambda x: 0 <= x <= 1, "from 0 to 1")
PORT = Bound(lambda x: 0 <= x < 65536, "0 (any free port) to 65535")
SEED = Bound(lambda x: 0 <= x < 2**63, "0 to 2**63 - 1", most=None)
MANY = Bound(lambda x: x > 0, "greater than 0", most=None)


class Aliases:
    """Names that other programs have for a field, as someone who comes from there types them.

    nanoGPT and minGPT, Megatron-LM's and DeepSpeed's flags, `transformers`' configurations and
    TrainingArguments; in lower case, with underscores.
    """

    def __init__(self, *names: str) -> None:
        self.names = names


class OnlyIf:
    """Condition without which nothing reads a field, so that typing it is an error.

    `key` is of the same section, or in full with its dot. It must be read itself, and have one of `values`
    (patterns of fnmatch); without any, a value other than null, 0, false and empty. With `or_null`, null
    stands for such a value.
    """

    def __init__(self, key: str, *values: object, or_null: bool = False) -> None:
        self.key, self.values, self.or_null = key, values, or_null

    def within(self, prefix: str) -> "OnlyIf":
        """The condition with its key in full, of a field in the section that `prefix` begins keys of."""
        return self if "." in self.key else OnlyIf(prefix + self.key, *self.values, or_null=self.or_null)

    def holds(self, value: Any) -> bool:
        """True for a value of the key with which the field is read."""
        if value is None and self.or_null:
            return True
        return any(fnmatchcase(str(value), str(v)) for v in self.values) if self.values else bool(value)


class ImportPath:
    """Marks a field that takes one of the `shipped` names, or the import path of the user's own object."""

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
    """The metadata of one type in an annotation such as `InputPath | None`; None if it has none."""
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
    """The problem of an expanded path itself: it is empty, too long, of no user, or cannot be read."""
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
    if role not in READ:  # what is written is checked by the writer
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
    first, space, rest = text.partition(" ")
    try:
        float(first)
    except ValueError:
        return "", entry
    return f"{first}{space}", rest.lstrip()
