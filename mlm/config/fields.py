"""Types of the fields of a config dataclass: paths by their purpose, and no unknown keys.

A field of a run spec that holds a path is annotated with one of these types; `build.py` then expands `~` and
rejects the empty path, and `path_faults.py` looks at what stands there.
"""

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args

Forbid: dict[str, str] = {"extra": "forbid"}
"""As `__pydantic_config__` of a dataclass: an unknown key is an error."""

Options = dict[str, bool | int | float | str]
"""Settings by name, of code that is not ours."""

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of Linux


class Role(Enum):
    """Purpose of a path."""

    INPUT = "read"
    """A file, folder, glob or prefix to read; or the id of a model or dataset on the Hub."""
    BLEND = "read, behind a weight"
    """`0.3 corpora/wiki`, or the path alone."""
    RESULT = "a file to write"
    """`-` is standard output."""
    PLACE = "a file to write, or the folder to write it in"
    FOLDER = "a folder to write"
    CACHE = "a folder to keep files in that can be made again"


InputPath = Annotated[str, Role.INPUT]
BlendEntry = Annotated[str, Role.BLEND]
ResultFile = Annotated[str, Role.RESULT]
OutPlace = Annotated[str, Role.PLACE]
OutFolder = Annotated[str, Role.FOLDER]
CacheFolder = Annotated[str, Role.CACHE]


def role_of(annotation: Any) -> Role | None:
    """The role in an annotation such as `InputPath | None` or `tuple[InputPath, ...]`; None: no path."""
    if isinstance(annotation, Role):
        return annotation
    metadata = getattr(annotation, "__metadata__", ())
    found = (role_of(inner) for inner in (*metadata, *get_args(annotation)))
    return next((role for role in found if role is not None), None)


def expanded(value: Any, role: Role) -> Any:
    """A typed path with `~` and `~user` replaced by the home folder, in lists too."""
    if isinstance(value, list | tuple):
        return [expanded(item, role) for item in value]
    if not isinstance(value, str):
        return value
    weight, path = split_weight(value) if role is Role.BLEND else ("", value)
    return weight + expand_home(path)


def expand_home(path: str) -> str:
    """`~/x` in full; a user without a home leaves it as it is."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        return path


def path_fault(key: str, value: Any, role: Role) -> str | None:
    """Problem of an expanded path itself: it is empty, or of a user who is not there."""
    if isinstance(value, list | tuple):
        return next((fault for item in value if (fault := path_fault(key, item, role))), None)
    if not isinstance(value, str):
        return None
    path = split_weight(value)[1] if role is Role.BLEND else value
    if not path.strip() and role is not Role.BLEND:  # blend.py says what is missing there
        return f"{key}= is empty; name a path, or omit the key"
    if path.startswith("~"):
        user = path.partition("/")[0]
        return f"{key}={value}: {user} is no user's home folder; write the path in full, or ./{path}"
    if "\0" in path:
        return f"{key}={value!r}: holds a null byte; correct the path"
    return length_fault(key, path)


def length_fault(key: str, path: str) -> str | None:
    """Problem of a path that no file system takes: the search for it would end in OSError."""
    longest = max((len(os.fsencode(name)) for name in path.split("/")), default=0)
    if longest > LONGEST_NAME or len(os.fsencode(path)) > LONGEST_PATH:
        return f"{key}={path[:40]}…: a name of {longest} bytes is too long for a file system; shorten it"
    return None


def split_weight(entry: str) -> tuple[str, str]:
    """`0.3 corpora/wiki` as "0.3 " and the path."""
    text = entry.lstrip()
    first, space, rest = text.partition(" ")
    try:
        float(first)
    except ValueError:
        return "", entry
    return f"{first}{space}", rest.lstrip()
