"""Ownership of folders: the only rules on what may be written, replaced or deleted.

A folder is ours if it has our marker (`.mlm.json`, with the type of the folder) or was recognisably written
by an earlier version. `claim_folder` makes one, or adopts a folder in which none of the names that a command
writes is taken; `delete_owned` deletes what mlm wrote in one. A file that a user names for a result is
replaced by `write_result` only if mlm wrote it (mlm/util/results.py recognises it).

No input, no ancestor of one, and neither the working directory, home nor the root is ever claimed or deleted,
and deletions follow no link.
"""

import glob
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError
from mlm.util.folder_types import (
    FORMAT,
    KINDS,
    LOCK,
    MARKER,
    SUMMARY_MARK,
    is_ours,
    is_summary,
    kind_of_folder,
    matches,
    read_marker,
)

__all__ = [
    "KINDS",
    "MARKER",
    "STDOUT",
    "SUMMARY_MARK",
    "claim_folder",
    "claim_problems",
    "delete_owned",
    "described",
    "is_ours",
    "is_summary",
    "kind_of_folder",
    "place_of",
    "read_marker",
    "rejected_place",
]

STDOUT = "-"
SEALED = {"run": ("checkpoints", "incidents", "profile"), "exported-model": ("*",)}
"""Names in folders of ours in which no other command may make a folder."""
HUB = "hub:"


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
        writes: patterns of the names to write; None means those of the type.
        same: contents to write under some names: a file of just that content is not in the way.
    """
    what, folder = f"{key}={path}", Path(path)
    if str(path) == STDOUT:
        return [f"{what}: standard output is not a folder; name a folder"]
    try:
        if not os.path.lexists(folder):
            return _no_place(what, folder.absolute()) or rejected_place(what, folder, inputs)
        if not folder.is_dir():
            return [f"{what}: is {described(folder)}; name a new folder"]
        marker = read_marker(folder)
        if is_ours(folder, kind):
            return []
        if marker is not None:
            found = marker.get("kind")
            noun = KINDS[found].noun if found in KINDS else "another folder of mlm"
            return [f"{what}: holds {noun}, not {KINDS[kind].noun}; name a new folder"]
        if problems := rejected_place(what, folder, inputs):
            return problems
        name = _in_the_way(folder, KINDS[kind].writes if writes is None else writes, same or {})
    except OSError as error:
        return [f"{what}: {error.filename or folder}: {error.strerror}; name a folder that can be read"]
    if name is None:
        return []
    return [f"{what}: holds {name}, which mlm did not write; name a new folder"]


def claim_folder(
    path: str | Path,
    kind: str,
    *,
    key: str = "out",
    inputs: Iterable[str | Path | None] = (),
    writes: Sequence[str] | None = None,
    same: Mapping[str, bytes] | None = None,
) -> Path:
    """Make a folder, or adopt an existing one, and mark it as ours; see `claim_problems`.

    Raises UserError if something of the user's is in the way, OSError.
    """
    problems = claim_problems(path, kind, key=key, inputs=inputs, writes=writes, same=same)
    if problems:
        raise UserError(problems[0])
    folder = Path(path)
    created = not folder.exists() or is_ours(folder, kind)
    folder.mkdir(parents=True, exist_ok=True)
    if read_marker(folder) is None:
        marker = {"format": FORMAT, "kind": kind, "created": created}
        write_atomic(folder / MARKER, (json.dumps(marker) + "\n").encode())
    return folder


def delete_owned(
    path: str | Path,
    kind: str,
    *,
    inputs: Iterable[str | Path | None] = (),
    names: Sequence[str] | None = None,
    keep_folder: bool = False,
) -> str | None:
    """Delete what mlm wrote in one of its folders, then the folder if nothing else is in it.

    `names`: patterns of what to delete, None means those of the type. Returns a line on what is kept and why,
    None if nothing is left. Never raises for what cannot be deleted.
    """
    folder = Path(path)
    try:
        if not os.path.lexists(folder):
            return None
        marker = read_marker(folder)
        if marker is None or marker.get("kind") != kind or not folder.is_dir():
            return f"{path}: not deleted, as mlm did not make it"
        if problems := rejected_place(str(path), folder, inputs, deletes=True):
            return f"{problems[0].partition(';')[0]}: not deleted"
        patterns = KINDS[kind].writes if names is None else names
        for entry in sorted(os.listdir(folder)):
            if matches(entry, patterns) or _is_partial(entry, patterns):
                _delete(folder / entry, KINDS[kind].inside)
        left = sorted(set(os.listdir(folder)) - {MARKER})
        if not keep_folder:
            (folder / MARKER).unlink()
        if left:
            return f"{path}: kept, as it holds {_listed(left)}, which mlm did not write"
        if keep_folder:
            return None
        if marker.get("created") and not folder.is_symlink():
            folder.rmdir()
    except OSError as error:
        return f"{path}: not all deleted: {error.filename or path}: {error.strerror}"
    return None


def _delete(path: Path, inside: Sequence[str]) -> None:
    """Delete a file, or in a folder what matches `inside` (no patterns: all) and then the empty folder.

    Links are kept: mlm makes none. Raises OSError.
    """
    if path.is_symlink():
        return
    if not path.is_dir():
        path.unlink()
    elif not inside:
        shutil.rmtree(path)  # follows no link
    else:
        for entry in os.listdir(path):
            if matches(entry, inside):
                _delete(path / entry, ())
        if not os.listdir(path):
            path.rmdir()


def _listed(names: Sequence[str]) -> str:
    """List the first names, and count the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _is_partial(name: str, patterns: Iterable[str]) -> bool:
    """True for an incomplete file that a kill left (`write_atomic`): .NAME.PID.partial."""
    stem, dot, pid = name.removeprefix(".").removesuffix(".partial").rpartition(".")
    hidden = name.startswith(".") and name.endswith(".partial")
    return hidden and bool(dot) and pid.isdigit() and matches(stem, (*patterns, MARKER))


def _in_the_way(folder: Path, patterns: Sequence[str], same: Mapping[str, bytes]) -> str | None:
    """Return the first non-empty entry of a folder whose name is to be written."""
    for name in sorted(os.listdir(folder)):
        if name == MARKER:
            return name  # not ours: read_marker could not parse it
        if matches(name, patterns) and not _holds_nothing(folder / name, same.get(name)):
            return name
    return None


def _holds_nothing(path: Path, content: bytes | None) -> bool:
    """True for an empty file or folder, a folder with only a lock, or a file of just that content."""
    mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):
        return all(name == LOCK for name in os.listdir(path))
    if not stat.S_ISREG(mode):
        return False
    size = path.stat().st_size
    return size == 0 or (content is not None and size == len(content) and path.read_bytes() == content)


def _no_place(what: str, path: Path) -> list[str]:
    """Return the problem of a path where no folder can be made."""
    parent = next(parent for parent in path.parents if os.path.lexists(parent))
    if parent.is_dir():
        return []
    return [f"{what}: {parent} is {described(parent)}, not a folder; name another folder"]


def rejected_place(
    what: str, folder: Path, inputs: Iterable[str | Path | None], *, deletes: bool = False
) -> list[str]:
    """Return the reason never to claim or delete a folder, whatever its content. Raises OSError."""
    place, cwd, home = folder.resolve(), Path.cwd(), Path.home().resolve()
    reason = None
    if place == cwd or (deletes and place in cwd.parents):
        reason = "is the working directory" if place == cwd else "holds the working directory"
    elif place == home or place in home.parents:
        reason = "is your home folder" if place == home else "holds your home folder"
    elif deletes and os.path.ismount(place):  # as `out`, containers receive a mounted volume
        reason = "is the root of a file system"
    elif not deletes and (sealed := _sealed_by(place)) is not None:
        reason = f"is in {sealed}, where mlm keeps its own files"
    if reason is None:
        for given in inputs:
            if (read := place_of(given)) is not None and (place == read or place in read.parents):
                reason = f"is the input {given}" if place == read else f"holds the input {given}"
                break
    return [] if reason is None else [f"{what}: {reason}; name a new folder"]


def _sealed_by(place: Path) -> Path | None:
    """Return the folder around a place, or the place itself, that only its own command writes to."""
    for folder in (place, *place.parents):
        if any(
            matches(folder.name, names) and is_ours(folder.parent, kind) for kind, names in SEALED.items()
        ):
            return folder
    return None


def place_of(given: str | Path | None) -> Path | None:
    """Return the file or folder that an input names: of a glob its first folder, of a prefix its .bin.

    None if there is nothing: an id of the Hub, a misspelled path.
    """
    text = "" if given is None else str(given)
    if not text or text.startswith(HUB) or text == STDOUT:
        return None
    if os.path.lexists(text):
        return Path(text).resolve()
    if os.path.lexists(f"{text}.bin"):
        return Path(f"{text}.bin").resolve()
    if not glob.has_magic(text):
        return None
    fixed: list[str] = []
    for part in Path(text).parts:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed).resolve()


def described(path: Path) -> str:
    """Describe the file at a path: "a FIFO"."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a broken link" if path.is_symlink() else "nothing"
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((word for test, word in kinds if test(mode)), "a file")
