"""The files of an `input=`, their formats, and neighbouring files that are not read."""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from mlm.corpus.config import DataBuildConfig, Paths, as_paths
from mlm.corpus.read.records import Input
from mlm.corpus.read.tables import HUB, HubSource, find_hub
from mlm.data.config import SPLITS
from mlm.data.receipt import INPUTS, RECEIPT, REJECTED
from mlm.data.records import is_json_lines
from mlm.util.errors import UserError, format_value
from mlm.util.object_store import S3, is_stored, list_objects
from mlm.util.ownership import KINDS, file_type_name, kind_of_folder, matches_any

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "txt", ".md": "txt", ".markdown": "txt"}
SUFFIXES |= {".html": "html", ".htm": "html"}
TEXTS = {*SUFFIXES.values()}
"""Formats of text, in some encoding."""
READABLE = ".jsonl, .ndjson, .json of lines, .txt, .md, .html (also .gz, .zst, .bz2, .xz) or .parquet"
WILDCARDS = "*?["
LISTED = 100
"""Most files that a receipt lists for each reason; all are counted."""
UNKNOWN_FORMAT, NO_PART, OWN, HIDDEN = "unknown format", "no part of the corpus", "written by mlm", "hidden"
CARD, ATTRIBUTES = "description of a dataset", "attributes of documents (Dolma)"
NAME_OTHERS = "make it readable, move it away, or name the others by a glob"


@dataclass(frozen=True, slots=True)
class UnreadFile:
    path: Path
    reason: str


@dataclass(frozen=True)
class Listing:
    inputs: tuple[Input, ...]
    unread: tuple[UnreadFile, ...] = ()

    def notes(self) -> list[str]:
        """Return lines on unread files that the user may have meant as input."""
        reasons = {
            f"neither {READABLE}, nor a part train, validation or test": (UNKNOWN_FORMAT, NO_PART),
            f"{CARD}; name it in input= to read it": (CARD,),
        }
        notes = list[str]()
        for reason, unread in reasons.items():
            names = [entry.path.name for entry in self.unread if entry.reason in unread]
            suffix = f" and {len(names) - 5} more" if len(names) > 5 else ""
            notes += [f"not read: {', '.join(names[:5])}{suffix} ({reason})"] * bool(names)
        return notes

    def account(self) -> dict[str, Any]:
        """Count unread files by reason, and list the first ones. Plain JSON."""
        paths: dict[str, list[str]] = {}
        for entry in self.unread:
            paths.setdefault(entry.reason, []).append(str(entry.path))
        return {
            reason: {"count": len(files), "files": files[:LISTED]} for reason, files in sorted(paths.items())
        }


MakeListing = Callable[[Iterable[Path], Path, Iterable[UnreadFile]], Listing]
"""(files, the folder that their names are relative to, unread files) -> listing."""


def find_inputs(config: DataBuildConfig) -> Listing:
    """Return the inputs of a build in corpus order, and the files next to them that are not read.

    Raises UserError without inputs, for two of one part, an unreadable one, or one that the build would
    overwrite or could not distinguish from its own files.
    """
    listing = search(config.input, HubSource("", config.hub_config, config.hub_split, config.hub_revision))
    out = Path(os.path.realpath(config.out))
    input_paths = [Path(os.path.realpath(path)) for path in as_paths(config.input)]
    output_paths = {out / name for name in (REJECTED, INPUTS, RECEIPT, "tokenizer.json")}
    for item in listing.inputs:
        if item.path.startswith((HUB, S3)):
            continue
        real_path = Path(os.path.realpath(item.path))
        if real_path in output_paths:
            raise UserError(f"out={config.out} would replace the input {item.path}; set another out=")
        # files in `out` are the user's only if `out` is the input folder itself, or above it
        if real_path.is_relative_to(out) and not any(path.is_relative_to(out) for path in input_paths):
            raise UserError(
                f"out={config.out} lies inside input={format_value(config.input)} and holds {item.path}, "
                "which no build wrote; set another out=, or move the file"
            )
    return listing


def search(paths: Paths, hub: HubSource | None = None) -> Listing:
    """Find the contents of an `input=`: Hub datasets (`hub` has their settings), files, folders, globs.

    With several paths, names of files begin with the path's number. Raises UserError, also for duplicates.
    """
    listings = [search_path(path, replace(hub or HubSource(""), path=path)) for path in as_paths(paths)]
    if not listings:
        raise UserError("input=[] names nothing to read: name a file, a folder or a glob")
    if len(listings) == 1:
        return listings[0]
    inputs = [
        replace(item, name=f"{number}/{item.name}")
        for number, listing in enumerate(listings)
        for item in listing.inputs
    ]
    counts = Counter(os.path.realpath(item.path) for item in inputs)
    if duplicate := next((item for item in inputs if counts[os.path.realpath(item.path)] > 1), None):
        raise UserError(f"input={format_value(paths)} names {duplicate.path} twice: remove one of the two")
    if len({item.split is None for item in inputs}) > 1:
        part = next(item for item in inputs if item.split)
        raise UserError(
            f"input={format_value(paths)}: {part.path} is the part {part.split}, and others are of no part: "
            "build a corpus of each, and join them by `mlm data merge`"
        )
    return Listing(tuple(inputs), tuple(entry for listing in listings for entry in listing.unread))


def search_path(path: str, hub: HubSource) -> Listing:
    if path.startswith(HUB):
        return Listing((find_hub(hub),))
    ignore_patterns.cache_clear()  # other builds may have started or ended
    root, setting = Path(path), f"input={path}"
    if is_stored(path):
        listing = in_store(path)
    elif root.is_dir():
        listing = in_folder(root)
    elif os.path.lexists(root):
        listing = readable_files([root], root.parent, [])
    elif any(letter in path for letter in WILDCARDS):
        listing = in_glob(path)
    else:
        raise UserError(f"{setting} does not exist: name a file {READABLE}, a folder or a glob of them")
    if not listing.inputs:
        unread_names = [entry.path.name for entry in listing.unread if entry.reason != HIDDEN]
        skipped = f", only {len(unread_names)} others such as {unread_names[0]}" if unread_names else ""
        fix = "name another, or rename it to its format; a .jsonl holds one object per line"
        raise UserError(f"{setting} holds no {READABLE}{skipped}: {fix}")
    # A README.md next to records, or to text without other Markdown, describes the data and is not read.
    cards = [item for item in listing.inputs if Path(item.path).name.lower() == "readme.md"]
    inputs = tuple(item for item in listing.inputs if item not in cards)
    kinds = {(kind_of(Path(item.path)) or "").partition(".")[0] for item in inputs}
    has_notes = any({".md", ".markdown"}.intersection(Path(item.path.lower()).suffixes) for item in inputs)
    if not inputs or (has_notes and kinds.isdisjoint(("jsonl", "parquet"))):
        return listing
    return Listing(inputs, (*listing.unread, *(UnreadFile(Path(item.path), CARD) for item in cards)))


def in_store(url: str) -> Listing:
    objects = {Path(stored.url.removeprefix(S3)): stored for stored in list_objects(url)}

    def make_listing(files: Iterable[Path], root: Path, unread: Iterable[UnreadFile]) -> Listing:
        inputs, unread_files = list[Input](), list(unread)
        for file in files:
            name, stored = file.relative_to(root), objects[file]
            if any(part.startswith(".") for part in name.parts):
                unread_files.append(UnreadFile(file, HIDDEN))
            elif kind_of(file) is None:
                unread_files.append(UnreadFile(file, UNKNOWN_FORMAT))
            else:
                inputs.append(Input(name.as_posix(), stored.url, stored.bytes, stored.digest, None))
        return Listing(tuple(inputs), tuple(unread_files))

    root, files = Path(url.removeprefix(S3)), sorted(objects)
    root = root.parent if root in objects else root
    return parts_in(root, files, make_listing) or make_listing(files, root, [])


def in_folder(root: Path) -> Listing:
    """Return the parts of a folder with train.*, else every readable file below it, sorted by path.

    Links to folders are followed once each. Raises UserError.
    """
    try:
        top_files = sorted(
            path for path in root.iterdir() if not (path.name.startswith(".") or path.is_dir())
        )
    except OSError as error:
        raise_unreadable(error)
    if (parts := parts_in(root, top_files, readable_files)) is not None:
        return parts
    files, unread, visited = list[Path](), list[UnreadFile](), set[str]()
    for path, folders, names in os.walk(root, followlinks=True, onerror=raise_unreadable):
        folder = Path(path)
        if (real_path := os.path.realpath(path)) in visited:
            unread.append(UnreadFile(folder, "link to a folder that is read already"))
            folders.clear()
            continue
        visited.add(real_path)
        reasons = {name: HIDDEN for name in (*folders, *names) if name.startswith(".")}
        reasons |= {name: OWN for name in (*folders, *names) if is_own(folder / name)}
        reasons |= {name: ATTRIBUTES for name in folders if name == "attributes" and "documents" in folders}
        unread += [UnreadFile(folder / name, reason) for name, reason in reasons.items()]
        folders[:] = sorted(name for name in folders if name not in reasons)
        files += [folder / name for name in names if name not in reasons]
    return readable_files(sorted(files), root, unread)


def in_glob(pattern: str) -> Listing:
    # `glob` silently skips unreadable folders that may hold matches.
    levels = [Path(pattern), *Path(pattern).parents]
    needs = {folder: glob.has_magic(child.name) for child, folder in pairwise(levels)}
    needs |= {level: True for level in levels if level.name == "**"}
    for level, is_listed in needs.items():
        for folder in glob.glob(os.path.join(level, ""), recursive=True):
            try:
                os.stat(os.path.join(folder, "."))
                if is_listed:
                    os.scandir(folder).close()
            except OSError as error:
                raise_unreadable(error)
    first = min(pattern.find(letter) for letter in WILDCARDS if letter in pattern)
    files = sorted({Path(path) for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)})
    if not files:
        raise UserError(f"input={pattern} matches no file: quote it from the shell; ** descends into folders")
    unread = [UnreadFile(path, OWN) for path in files if is_own(path)]
    inputs = [path for path in files if not is_own(path)]
    return readable_files(inputs, Path(pattern[:first] + "x").parent, unread)


def parts_in(root: Path, files: list[Path], make_listing: MakeListing) -> Listing | None:
    """Return train.*, validation.* and test.* of the folder `root`; None if it has no such file."""
    parts = dict[Path, str]()
    for file in files:
        stem, kind = formats(file)
        is_named = kind is not None and stem in SPLITS and file.name.startswith(stem)
        if is_named and file.parent == root and not is_own(file):
            parts[file] = stem  # train of train.jsonl.gz
    if not parts:
        return None
    part_files = sorted(parts, key=lambda file: SPLITS.index(parts[file]))
    if "train" not in parts.values():
        raise UserError(
            f"input={root} holds {part_files[0].name} but no train.jsonl or the like: add it, or name "
            f"the files of one corpus by a glob"
        )
    for first, second in pairwise(part_files):
        if parts[first] == parts[second]:
            raise UserError(
                f"input={root} holds {first.name} and {second.name}, all for the part {parts[first]}: "
                "keep one of them"
            )
    unread = [UnreadFile(file, OWN if is_own(file) else NO_PART) for file in files if file not in parts]
    listing = make_listing(part_files, root, unread)
    inputs = tuple(replace(item, split=parts[root / item.name]) for item in listing.inputs)
    return replace(listing, inputs=inputs)


def readable_files(files: Iterable[Path], root: Path, unread: Iterable[UnreadFile]) -> Listing:
    """Return the files as inputs, named by their paths below `root`, and the files of unknown formats.

    Raises UserError for an unreadable file and a dangling link.
    """
    inputs, all_unread = list[Input](), list(unread)
    for file in files:
        if kind_of(file) is None and os.path.exists(file):
            all_unread.append(UnreadFile(file, UNKNOWN_FORMAT))
            continue
        if (kind := file_type_name(file)) != "a file":  # opening a FIFO would block
            raise UserError(f"input {file} is {kind}: {NAME_OTHERS}")
        try:
            open(file, "rb").close()
        except OSError as error:
            raise_unreadable(error)
        inputs.append(Input(file.relative_to(root).as_posix(), str(file), file.stat().st_size, "", None))
    return Listing(tuple(inputs), tuple(sorted(all_unread, key=lambda entry: entry.path)))


def raise_unreadable(error: OSError) -> NoReturn:
    raise UserError(f"input {error.filename}: {error.strerror}: {NAME_OTHERS}") from error


def kind_of(path: Path) -> str | None:
    """Return the format of a file: jsonl.gz for a.ndjson.gz; None for an unknown format."""
    return formats(path)[1]


def formats(path: Path) -> tuple[str, str | None]:
    """Return the name without the suffixes of its format, and that format.

    A compressed .json holds one object per line, as in published corpora (C4, The Pile); a plain .json is
    read if its first line is an object and more lines follow.
    """
    name = path.name.lower()
    packing = next((suffix for suffix in (".gz", ".zst", ".bz2", ".xz") if name.endswith(suffix)), "")
    inner = Path(name.removesuffix(packing))
    if inner.suffix in SUFFIXES:
        return inner.stem, SUFFIXES[inner.suffix] + packing
    if inner.suffix == ".json":
        try:
            holds_lines = bool(packing) or (path.is_file() and is_json_lines(path))
        except OSError:
            holds_lines = False
        if holds_lines:
            return inner.stem, "jsonl" + packing
    if inner.suffix == ".parquet" and not packing:
        return inner.stem, "parquet"
    return path.name, None


@lru_cache(maxsize=1024)
def ignore_patterns(folder: Path) -> tuple[str, ...]:
    """Return patterns of the files that a build wrote into its folder; () for other folders."""
    kind = kind_of_folder(folder)
    return tuple(KINDS[kind].writes) if kind in ("corpus", "corpus-work") else ()


def is_own(path: Path) -> bool:
    """True for files that a build wrote: in a corpus or work folder, or a stage's folder."""
    return any(matches_any(entry.name, ignore_patterns(entry.parent)) for entry in (path, path.parent))
