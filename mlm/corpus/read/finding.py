"""The files that an `input=` names, their formats, and everything beside them that is not read."""

import errno
import glob
import os
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlm.corpus.config import DataBuildConfig
from mlm.corpus.read.records import Input
from mlm.corpus.read.tables import HUB, HubSource, find_hub
from mlm.data.config import SPLITS
from mlm.data.receipt import INPUTS, RECEIPT, REJECTED
from mlm.util.errors import UserError
from mlm.util.object_store import S3, is_stored, list_objects
from mlm.util.ownership import KINDS, kind_of_folder, matches_any

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
LINES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "txt"}
READABLE = ".jsonl, .ndjson, .txt (also .gz, .zst, .bz2, .xz), .json.gz or .parquet"


def kind_of(path: Path) -> str | None:
    """Return the format of a file: jsonl.gz for a.ndjson.gz; None for an unknown format."""
    return formats(path)[1]


def formats(path: Path) -> tuple[str, str | None]:
    """Return the name without the suffixes of its format, and that format.

    A compressed .json holds one object per line in published corpora (C4, The Pile); a plain .json is mostly
    one value, and is not read.
    """
    name = path.name.lower()
    packing = next((suffix for suffix in COMPRESSED if name.endswith(suffix)), "")
    inner = Path(name.removesuffix(packing))
    if inner.suffix in LINES or (inner.suffix == ".json" and packing):
        return inner.stem, LINES.get(inner.suffix, "jsonl") + packing
    if inner.suffix == ".parquet" and not packing:
        return inner.stem, "parquet"
    return path.name, None


def part_name(path: Path, root: Path) -> str | None:
    """Return the part that a readable file of the folder `root` is named after: train for train.jsonl.gz."""
    stem, kind = formats(path)
    is_part = path.parent == root and kind is not None and stem in SPLITS and path.name.startswith(stem)
    return stem if is_part else None


OF_BUILDS = ("corpus", "corpus-work")  # types of folders
IN_OUT = (REJECTED, INPUTS, RECEIPT, "tokenizer.json")


@lru_cache(maxsize=1024)
def own_patterns(folder: Path) -> tuple[str, ...]:
    """Return patterns of the entries of a folder that a build wrote; none unless it is a build's."""
    kind = kind_of_folder(folder)
    return tuple(KINDS[kind].writes) if kind in OF_BUILDS else ()


def is_own(path: Path) -> bool:
    """True for what a build wrote: files of a corpus or a work folder, and of a stage's folder in that."""
    return any(matches_any(each.name, own_patterns(each.parent)) for each in (path, path.parent))


def check_apart(inputs: Collection[str], setting: str, out: str) -> None:
    """Reject a build that could not distinguish its files from its inputs, or would overwrite one.

    `inputs` are paths of files. Raises UserError.
    """
    folder, given = os.path.realpath(out), os.path.realpath(setting.partition("=")[2])
    for path in inputs:
        real = os.path.realpath(path)
        if real in {os.path.join(folder, name) for name in IN_OUT}:
            raise UserError(f"out={out} would replace the input {path}; set another out=")
        # files in `out` are the user's only if `out` is the input folder itself, or above it
        if is_below(real, folder) and not is_below(given, folder):
            raise UserError(
                f"out={out} lies inside {setting} and holds {path}, which no build wrote; set another out=, "
                "or move the file"
            )


def is_below(path: str, folder: str) -> bool:
    """True if a path is a folder or lies in it. Both are real paths."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


WILDCARDS = "*?["
LISTED = 100
"""Limit on the files that a receipt names for each reason; all are counted."""
UNKNOWN_FORMAT, NO_PART, OWN, HIDDEN = "unknown format", "no part of the corpus", "written by mlm", "hidden"
READ_ALREADY = "link to a folder that is read already"
SPECIAL_FILES = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


@dataclass(frozen=True, slots=True)
class Unread:
    """A file or folder that is not read."""

    path: Path
    reason: str
    is_error: bool = False
    """True if it belongs to the input and cannot be read."""


@dataclass(frozen=True)
class Listing:
    """The contents of an input path."""

    inputs: tuple[Input, ...]
    unread: tuple[Unread, ...] = ()

    def warning(self) -> str | None:
        """Warn in a line of files that are not read; None if all are read."""
        lines, errors = list[str](), [entry for entry in self.unread if entry.is_error]
        if errors:
            lines.append(f"not read: {list_entries(errors)}")
        names = [entry.path.name for entry in self.unread if entry.reason in (UNKNOWN_FORMAT, NO_PART)]
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            known = f"neither {READABLE}, nor a part train, validation or test"
            lines.append(f"not read: {', '.join(names[:5])}{more} ({known})")
        return "\n".join(lines) or None

    def account(self) -> dict[str, Any]:
        """Count what is not read by reason, and name the first files. Plain JSON."""
        files: dict[str, list[str]] = {}
        for entry in self.unread:
            files.setdefault(entry.reason, []).append(str(entry.path))
        return {
            reason: {"count": len(some), "files": some[:LISTED]} for reason, some in sorted(files.items())
        }


def list_entries(entries: Sequence[Unread]) -> str:
    """List some files with their reasons."""
    named = ", ".join(f"{entry.path} ({entry.reason})" for entry in entries[:3])
    return named + (f" and {len(entries) - 3} more" if len(entries) > 3 else "")


def find_inputs(config: DataBuildConfig) -> Listing:
    """Return the inputs of a build in corpus order, and the files beside them that are not read.

    Raises UserError for none, or two for one part.
    """
    hub = HubSource(config.input, config.hub_config, config.hub_split, config.hub_revision)
    listing = search(config.input, hub, unreadable=config.unreadable)
    if config.out and not config.input.startswith((HUB, S3)):
        check_apart([item.path for item in listing.inputs], f"input={config.input}", config.out)
    return listing


def search(path: str, hub: HubSource | None = None, *, unreadable: str = "error") -> Listing:
    """Find the contents of an `input=`: a Hub dataset, a file, a folder or a glob. Raises UserError."""
    if path.startswith(HUB):
        dataset, size, digest = find_hub(hub or HubSource(path))
        return Listing((Input(path, dataset, size, digest, None),))
    own_patterns.cache_clear()  # another build may have begun or ended
    root, setting = Path(path), f"input={path}"
    if is_stored(path):
        listing = in_store(path)
    elif root.is_dir():
        listing = in_folder(root, *visible_files(root), readable_files)
    elif os.path.lexists(root):
        listing = readable_files([root], root.parent, [])
    elif any(letter in path for letter in WILDCARDS):
        listing = in_glob(path)
    else:
        raise UserError(f"{setting} does not exist: name a file {READABLE}, a folder or a glob of them")
    errors = [entry for entry in listing.unread if entry.is_error]
    if errors and (unreadable == "error" or not listing.inputs):
        fix = "fix them or set unreadable=skip" if unreadable == "error" else "name another"
        raise UserError(f"{setting} holds files that cannot be read: {list_entries(errors)}; {fix}")
    if not listing.inputs:
        others = [entry.path.name for entry in listing.unread if entry.reason != HIDDEN]
        held = f", only {len(others)} others such as {others[0]}" if others else ""
        fix = "name another, or rename it to its format; a .jsonl holds one object per line"
        raise UserError(f"{setting} holds no {READABLE}{held}: {fix}")
    return listing


def in_store(url: str) -> Listing:
    """Return the inputs among the object at a URL, or all below it. Raises UserError."""
    found = {Path(each.url.removeprefix(S3)): each for each in list_objects(url)}

    def read(files: Iterable[Path], root: Path, unread: Iterable[Unread]) -> Listing:
        inputs, others = list[Input](), list(unread)
        for file in files:
            name, each = file.relative_to(root), found[file]
            is_hidden = any(part.startswith(".") for part in name.parts)
            if is_hidden or kind_of(file) is None:
                others.append(Unread(file, HIDDEN if is_hidden else UNKNOWN_FORMAT))
            else:
                inputs.append(Input(name.as_posix(), each.url, each.bytes, each.digest, None))
        return Listing(tuple(inputs), tuple(others))

    root = Path(url.removeprefix(S3))
    return in_folder(root.parent if root in found else root, sorted(found), [], read)


Read = Callable[[Iterable[Path], Path, Iterable[Unread]], Listing]


def in_folder(root: Path, files: list[Path], unread: list[Unread], read: Read) -> Listing:
    """Return the parts of a folder with train.*, else every readable file below it, sorted by path."""
    parts: dict[Path, str] = {file: part for file in files if (part := part_name(file, root)) is not None}
    if not parts:
        return read(files, root, unread)
    named = sorted(parts, key=lambda file: SPLITS.index(parts[file]))
    if "train" not in parts.values():
        raise UserError(
            f"input={root} holds {named[0].name} but no train.jsonl or the like: add it, or name "
            f"the files of one corpus by a glob"
        )
    for one, other in pairwise(named):
        if parts[one] == parts[other]:
            raise UserError(
                f"input={root} holds {one.name} and {other.name}, all for the part {parts[one]}: "
                "keep one of them"
            )
    others = [Unread(file, NO_PART) for file in files if file not in parts]
    # beside the parts nothing is read anyway
    unread = [
        replace(entry, is_error=entry.is_error and part_name(entry.path, root) is not None)
        for entry in unread
    ]
    listing = read(named, root, [*unread, *others])
    return replace(
        listing, inputs=tuple(replace(item, split=parts[root / item.name]) for item in listing.inputs)
    )


def in_glob(pattern: str) -> Listing:
    """Return the files that a glob matches, sorted by path. Raises UserError."""
    first = min(pattern.find(letter) for letter in WILDCARDS if letter in pattern)
    files = [Path(path) for path in sorted(glob.glob(pattern, recursive=True)) if not os.path.isdir(path)]
    unread = denied_folders(pattern)
    if not files and not unread:
        raise UserError(f"input={pattern} matches no file: quote it from the shell; ** descends into folders")
    own = [path for path in files if is_own(path)]
    kept = sorted(set(files).difference(own))
    unread += [Unread(path, OWN) for path in own]
    return readable_files(kept, Path(pattern[:first] + "x").parent, unread)


def denied_folders(pattern: str) -> list[Unread]:
    """Return the folders that may hold matches of a glob and deny a look: `glob` passes over them."""
    levels = [Path(pattern), *Path(pattern).parents]
    needs = {folder: glob.has_magic(below.name) for below, folder in pairwise(levels)}
    needs |= {level: True for level in levels if level.name == "**"}
    denied = dict[Path, Unread]()
    for level, is_listed in needs.items():
        for folder in glob.glob(os.path.join(level, ""), recursive=True):
            try:
                os.stat(os.path.join(folder, "."))
                if is_listed:
                    os.scandir(folder).close()
            except OSError as error:
                denied[Path(folder)] = Unread(Path(folder), reason_of(error), is_error=True)
    return list(denied.values())


def readable_files(files: Iterable[Path], root: Path, unread: Iterable[Unread]) -> Listing:
    """Return the files that can be read as inputs, named by their paths below `root`, and the others."""
    inputs, others = list[Input](), list(unread)
    for file in files:
        known = kind_of(file) is not None
        reason = problem_of(file, opened=known)
        if reason is not None:
            # a link that leads nowhere may have been one to a folder
            others.append(Unread(file, reason, is_error=known or not file.suffix))
        elif not known:
            others.append(Unread(file, UNKNOWN_FORMAT))
        else:
            inputs.append(Input(file.relative_to(root).as_posix(), str(file), file.stat().st_size, "", None))
    return Listing(tuple(inputs), tuple(sorted(others, key=lambda entry: entry.path)))


def visible_files(root: Path) -> tuple[list[Path], list[Unread]]:
    """Return all files below a folder but hidden ones and ours, sorted by path, and those left out.

    Links to folders are followed, once each.
    """
    files, unread, seen = list[Path](), list[Unread](), set[str]()

    def failed(error: OSError) -> None:
        unread.append(Unread(Path(error.filename), reason_of(error), is_error=True))

    for place, folders, names in os.walk(root, followlinks=True, onerror=failed):
        folder = Path(place)
        if (real := os.path.realpath(place)) in seen:
            unread.append(Unread(folder, READ_ALREADY))
            folders.clear()
            continue
        seen.add(real)
        reasons = {name: HIDDEN for name in (*folders, *names) if name.startswith(".")}
        reasons |= {name: OWN for name in (*folders, *names) if is_own(folder / name)}
        unread += [Unread(folder / name, reason) for name, reason in reasons.items()]
        folders[:] = sorted(name for name in folders if name not in reasons)
        files += [folder / name for name in names if name not in reasons]
    return sorted(files), unread


def problem_of(path: Path, *, opened: bool = True) -> str | None:
    """Return the reason why a file cannot be read, None if it can. `opened`: also try to open it."""
    try:
        if (name := SPECIAL_FILES.get(stat.S_IFMT(os.stat(path).st_mode))) is not None:
            return name
        if opened:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:
        return "broken link"
    except OSError as error:
        return reason_of(error)
    return None


def reason_of(error: OSError) -> str:
    """Describe an error of the operating system."""
    return "circular link" if error.errno == errno.ELOOP else (error.strerror or type(error).__name__).lower()
