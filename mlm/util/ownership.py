"""Ownership of files: the rule on what mlm may write, replace and delete.

mlm owns a folder with its marker, `.mlm.json`, which names the folder's type. `claim_folder` makes one, or
adopts a folder without any of the names that a command writes; `delete_owned` deletes these names, and
follows no link. A result is a regular file, which `write_result` replaces only if mlm wrote it (results.py).

Inputs, their parents, the working directory, home and the root are never claimed or deleted.
"""

import errno
import glob
import json
import os
import pwd
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mlm.util.errors import UserError
from mlm.util.files import file_type, read_regular, write_atomic

MARKER = ".mlm.json"
FORMAT = "mlm-folder-1"
RUN_SETTINGS = "config.yaml"
"""File of a run directory with its composed configuration."""
CHECKPOINTS = "checkpoints"
"""Folder of a run directory that holds its checkpoints."""
LOCK = ".lock"  # first file in a folder of checkpoints
STDOUT = "-"
HUB = "hub:"


@dataclass(frozen=True)
class FolderType:
    """A type of folder that mlm makes."""

    noun: str
    """In messages: "a run"."""
    writes: tuple[str, ...] = ()
    """Patterns of names at its top level, which must not exist before and which `delete_owned` deletes."""
    inside: tuple[str, ...] = ()
    """Patterns of names written in its subfolders; empty: all of their content."""


KINDS: dict[str, FolderType] = {
    "run": FolderType(
        "a run",
        (
            *(RUN_SETTINGS, "tokenizer.json", "metrics.jsonl", CHECKPOINTS),
            *("best", "result.json", "predictions", "incidents", "profile"),
        ),
    ),
    "corpus": FolderType(
        "a corpus",
        (
            *(f"{part}.{end}" for part in ("train", "validation", "test") for end in ("bin", "idx")),
            *("corpus.json", "tokenizer.json", "rejected.jsonl", "corpus-inputs.jsonl", ".building", "work"),
        ),
    ),
    "corpus-work": FolderType(
        "the work of a build",
        (
            *("tokenizer.json", "evaluation.jsonl"),
            *(f"{stage}-{'[0-9a-f]' * 8}*" for stage in ("clean", "match", "link", "group", "verify")),
            *(f"{stage}-{'[0-9a-f]' * 8}*" for stage in ("gather", "tokenise", "merge")),
        ),
        (
            *(f"{'[0-9]' * 5}{rest}" for rest in (".*", "*.npy", "*.bin", "*.idx")),
            *(f".{'[0-9]' * 5}.*", ".*.partial", "*.partial", "rejected.jsonl"),
            *("members.npy", "bounds.npy", "near.npy", "firsts.npy"),
            *(f"{part}[.-]*" for part in ("train", "validation", "test")),
        ),
    ),
    "exported-model": FolderType("an exported model", ("*",)),
    "predictions": FolderType("predictions", ("*.tsv", "*.json")),
    "verify-resume": FolderType("a verify-resume"),
    "unfinished": FolderType("an import or export that did not finish"),
}
"""Folders that mlm makes. In a user's folder, names in `writes` are never replaced."""


# ---- folders


def claim_folder(
    path: str | Path,
    kind: str,
    *,
    key: str = "out",
    inputs: Iterable[str | Path | None] = (),
    writes: Sequence[str] | None = None,
    same: Mapping[str, bytes] | None = None,
) -> Path:
    """Make a folder, or adopt an existing one, and mark it; see `claim_problems`.

    Raises UserError if a user's file would be replaced, OSError.
    """
    if problems := claim_problems(path, kind, key=key, inputs=inputs, writes=writes, same=same):
        raise UserError(problems[0])
    folder = Path(path)
    if kind_of_folder(folder) != kind:
        marker = {"format": FORMAT, "kind": kind, "created": not folder.exists()}
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / MARKER, (json.dumps(marker) + "\n").encode())
    return folder


def claim_problems(
    path: str | Path,
    kind: str,
    *,
    key: str = "out",
    inputs: Iterable[str | Path | None] = (),
    writes: Sequence[str] | None = None,
    same: Mapping[str, bytes] | None = None,
) -> list[str]:
    """Return problems that keep a command from claiming a folder, for its preflight.

    Args:
        path: the folder.
        kind: its type, a key of KINDS.
        key: the key that named the folder, for messages.
        inputs: inputs of the command, as typed.
        writes: patterns of the names to write; None means the type's `writes`.
        same: contents to write by name; an existing file may have exactly this content.
    """
    setting, folder = f"{key}={path}", Path(path)
    if str(path) == STDOUT:
        return [f"{setting}: standard output is not a folder; name a folder"]
    try:
        if not os.path.lexists(folder):
            parent = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
            if parent.is_dir():
                return rejected_place(setting, folder, inputs)
            return [f"{setting}: {parent} is {file_type_name(parent)}, not a folder; name another folder"]
        if not folder.is_dir():
            return [f"{setting}: is {file_type_name(folder)}; name a new folder"]
        if (other := kind_of_folder(folder)) is not None:
            nouns = f"{KINDS[other].noun}, not {KINDS[kind].noun}"
            return [] if other == kind else [f"{setting}: holds {nouns}; name a new folder"]
        if problems := rejected_place(setting, folder, inputs):
            return problems
        patterns, same = KINDS[kind].writes if writes is None else writes, same or {}
        for name in sorted(os.listdir(folder)):
            is_written = matches_any(name, patterns)
            # Reject foreign markers too.
            if name == MARKER or (is_written and not _is_replaceable(folder / name, same.get(name))):
                return [f"{setting}: holds {name}, which mlm did not write; name a new folder"]
    except OSError as error:
        return [f"{setting}: {error.filename or folder}: {error.strerror}; name a folder that can be read"]
    return []


def _is_replaceable(path: Path, content: bytes | None) -> bool:
    """True for an empty file or folder, a folder with only a lock, or a file with exactly this content."""
    mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):
        return all(name == LOCK for name in os.listdir(path))
    if not stat.S_ISREG(mode):
        return False
    size = path.stat().st_size
    return size == 0 or (content is not None and size == len(content) and path.read_bytes() == content)


def read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads(read_regular(folder / MARKER, 1 << 16))
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(marker, dict) and marker.get("format") == FORMAT and str(marker.get("kind")) in KINDS
    return marker if is_ours else None


def kind_of_folder(folder: Path) -> str | None:
    """Return the type (a key of KINDS) of a folder that mlm made; None for others."""
    marker = read_marker(folder)
    return None if marker is None else str(marker["kind"])


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# ---- deleting


def delete_owned(
    path: str | Path,
    kind: str,
    *,
    inputs: Iterable[str | Path | None] = (),
    names: Sequence[str] | None = None,
    keep_folder: bool = False,
) -> str | None:
    """Delete the files of mlm in one of its folders, then the folder if it is empty.

    `names`: patterns of names to delete; None means the type's `writes`. Returns a line on remaining files,
    None without any. Raises no OSError.
    """
    folder = Path(path)
    try:
        if not os.path.lexists(folder):
            return None
        marker = read_marker(folder)
        if marker is None or marker["kind"] != kind:
            return f"{path}: not deleted, as mlm did not make it"
        if problems := rejected_place(str(path), folder, inputs, deletes=True):
            return f"{problems[0].partition(';')[0]}: not deleted"
        patterns = KINDS[kind].writes if names is None else names
        for entry in sorted(os.listdir(folder)):
            # Incomplete files of a killed process too (`partial_path`): .NAME.DIGITS.partial
            stem, dot, digits = entry.removeprefix(".").removesuffix(".partial").rpartition(".")
            is_partial = entry.startswith(".") and entry.endswith(".partial") and dot and digits.isdigit()
            if matches_any(entry, patterns) or (is_partial and matches_any(stem, (*patterns, MARKER))):
                _delete(folder / entry, KINDS[kind].inside)
        foreign = sorted(set(os.listdir(folder)) - {MARKER})
        if not keep_folder:
            (folder / MARKER).unlink()
        if foreign:
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            return f"{path}: kept, as it holds {', '.join(foreign[:3])}{more}, which mlm did not write"
        if marker.get("created") and not keep_folder and not folder.is_symlink():
            folder.rmdir()
    except OSError as error:
        return f"{path}: not all deleted: {error.filename or path}: {error.strerror}"
    return None


def _delete(path: Path, inside: Sequence[str]) -> None:
    """Delete a file, or names in a folder that match `inside` (all if empty), then the empty folder.

    Keeps links, as mlm makes none. Raises OSError.
    """
    if path.is_symlink():
        return
    if not path.is_dir():
        path.unlink()
    elif not inside:
        shutil.rmtree(path)  # follows no link
    else:
        for entry in os.listdir(path):
            if matches_any(entry, inside):
                _delete(path / entry, ())
        if not os.listdir(path):
            path.rmdir()


# ---- places never claimed or deleted


def rejected_place(
    setting: str, folder: Path, inputs: Iterable[str | Path | None], *, deletes: bool = False
) -> list[str]:
    """Return the problem of a folder that may never be claimed or deleted. Raises OSError."""
    path, cwd, home = real_path(folder), Path.cwd(), real_path(Path.home())
    reason = None
    if path == cwd or (deletes and path in cwd.parents):
        reason = "is the working directory" if path == cwd else "holds the working directory"
    elif path == home or path in home.parents:
        reason = "is your home folder" if path == home else "holds your home folder"
    elif deletes and os.path.ismount(path):  # claimed as `out`, it may be a container's volume
        reason = "is the root of a file system"
    for name in inputs if reason is None else ():
        if (source := input_path(name)) is not None and (path == source or path in source.parents):
            reason = f"is the input {name}" if path == source else f"holds the input {name}"
            break
    return [] if reason is None else [f"{setting}: {reason}; name a new folder"]


def input_path(path: str | Path | None) -> Path | None:
    """Return the existing path of an input: a glob's first folder, a prefix's .bin.

    None if nothing exists: a Hub id, a misspelled path.
    """
    text = "" if path is None else str(path)
    if not text or text.startswith(HUB) or text == STDOUT:
        return None
    for name in (text, f"{text}.bin"):
        if os.path.lexists(name):
            return real_path(name)
    if not glob.has_magic(text):
        return None
    parts = Path(text).parts
    return real_path(Path(*parts[: next(n for n, part in enumerate(parts) if glob.has_magic(part))]))


def real_path(path: str | Path) -> Path:
    """Resolve links; a loop of links stays as it is, where Path.resolve raises."""
    return Path(os.path.realpath(path))


def file_type_name(path: Path) -> str:
    try:
        return file_type(path.stat().st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a loop of links"
        return "a broken link" if os.path.islink(path) else "nothing"


# ---- users and rights


def owner_of(path: Path) -> str:
    return user_name(path.stat().st_uid)


def user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def read_obstacle(path: str) -> str | None:
    """The reason why this user cannot read a path; None if they can, or it does not exist."""
    target = Path(path)
    for folder in (*reversed(target.absolute().parents), target):
        try:
            mode = folder.stat().st_mode & 0o777
            access = os.R_OK if folder is target else os.X_OK
            if not os.access(folder, access | (os.X_OK if folder.is_dir() else 0)):
                return f"permission denied: {folder} belongs to {owner_of(folder)} (mode {mode:03o})"
        except OSError:
            return None
    return None
