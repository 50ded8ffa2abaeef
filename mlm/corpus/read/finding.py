"""The files that an `input=` names, their formats, and everything beside them that is not read."""

import errno
import glob
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlm.corpus.config import DataBuildConfig
from mlm.corpus.read.records import Input
from mlm.corpus.read.tables import HUB, HubSource, find_hub
from mlm.data.corpus_files import SPLITS
from mlm.data.receipt import INPUTS, RECEIPT, REJECTED
from mlm.util.errors import UserError
from mlm.util.ownership import KINDS, kind_of_folder, matches

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


def part_name(path: Path) -> str | None:
    """Return the part that a readable file is named after: train for train.jsonl.gz."""
    stem, kind = formats(path)
    return stem if kind is not None and stem in SPLITS and path.name.startswith(stem) else None


def remedy_for(path: Path) -> str:
    """Suggest a fix for a file of unknown format."""
    if path.suffix.lower() == ".json":
        return "a .json file is one value; write one object per line and call it .jsonl"
    return "rename it to its format, or convert it"


OF_BUILDS = ("corpus", "corpus-work")  # types of folders
IN_OUT = (REJECTED, INPUTS, RECEIPT, "tokenizer.json")


def own_names(folder: Path, names: Collection[str]) -> set[str]:
    """Return the entries of a folder that a build wrote: files of a corpus, or of a work folder."""
    kind = kind_of_folder(folder)
    return {name for name in names if matches(name, KINDS[kind].writes)} if kind in OF_BUILDS else set()


def check_apart(inputs: Collection[str], setting: str, out: str, work: str | None) -> None:
    """Reject a build that could not distinguish its files from its inputs, or would overwrite one.

    `inputs` are paths of files. Raises UserError.
    """
    place = os.path.realpath(out)
    between = os.path.realpath(work) if work is not None else os.path.join(place, "work")
    given = os.path.realpath(setting.partition("=")[2])
    written = {os.path.join(place, name) for name in IN_OUT}
    for path in inputs:
        real = os.path.realpath(path)
        key, folder = ("work", between) if is_below(real, between) else ("out", place)
        shown = work if key == "work" and work is not None else out
        if real in written:
            raise UserError(f"out={out} would replace the input {path}; set another out=")
        # other files in `out` are the user's only if `out` is the input folder itself
        if is_below(real, folder) and not is_below(given, folder):
            raise UserError(
                f"{key}={shown} lies inside {setting} and holds {path}, which no build wrote; set another "
                f"{key}=, or move the file"
            )
        if key == "work" and is_below(real, between):
            raise UserError(f"{key}={shown} holds the input {path}; set another {key}=")


def is_below(path: str, folder: str) -> bool:
    """True if a path is a folder or lies in it. Both are real paths."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


WILDCARDS = "*?["
LISTED = 100
"""Limit on the files that a receipt names for each reason; all are counted."""
UNKNOWN_FORMAT, NO_PART, OWN, HIDDEN = "unknown format", "no part of the corpus", "written by mlm", "hidden"
READ_ALREADY = "link to a folder that is read already"
SPECIAL_FILES = (
    (stat.S_ISFIFO, "FIFO"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


@dataclass(frozen=True, slots=True)
class Unread:
    """A file or folder that is not read."""

    path: Path
    reason: str
    is_error: bool = False
    """True if it belongs to the input and cannot be read."""


@dataclass(frozen=True)
class Found:
    """The contents of an input path."""

    inputs: tuple[Input, ...]
    unread: tuple[Unread, ...] = ()

    @property
    def passed_over(self) -> tuple[Path, ...]:
        """Files of an unknown format, or that are not a part of the corpus."""
        return tuple(entry.path for entry in self.unread if entry.reason in (UNKNOWN_FORMAT, NO_PART))

    def warning(self) -> str | None:
        """Warn in a line of files that are not read; None if all are read."""
        lines, errors = list[str](), [entry for entry in self.unread if entry.is_error]
        if errors:
            lines.append(f"not read: {in_words(errors)}")
        if names := [path.name for path in self.passed_over]:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            known = f"neither {READABLE}, nor a part train, validation or test"
            lines.append(f"not read: {', '.join(names[:5])}{more} ({known})")
        return "\n".join(lines) or None

    def account(self) -> dict[str, Any]:
        """Count what is not read by reason, and name the first files. Plain JSON."""
        counts, named = Counter[str](), dict[str, list[str]]()
        for entry in self.unread:
            counts[entry.reason] += 1
            files = named.setdefault(entry.reason, [])
            if len(files) < LISTED:
                files.append(str(entry.path))
        return {reason: {"count": counts[reason], "files": named[reason]} for reason in sorted(counts)}


def in_words(entries: Sequence[Unread]) -> str:
    """List some files with their reasons."""
    named = ", ".join(f"{entry.path} ({entry.reason})" for entry in entries[:3])
    return named + (f" and {len(entries) - 3} more" if len(entries) > 3 else "")


def find_inputs(config: DataBuildConfig) -> list[Input]:
    """Return the inputs of a build in corpus order. Raises UserError for none, or two for one part."""
    return list(find_all(config).inputs)


def find_all(config: DataBuildConfig) -> Found:
    """Return the inputs of a build, and the files beside them that are not read. Raises UserError."""
    hub = HubSource(config.input, config.hub_config, config.hub_split, config.hub_revision)
    found = search(config.input, hub, unreadable=config.unreadable)
    if config.out and not config.input.startswith(HUB):
        check_apart([item.path for item in found.inputs], f"input={config.input}", config.out, config.work)
    return found


def search(path: str, hub: HubSource | None = None, *, unreadable: str = "error") -> Found:
    """Find the contents of an `input=`: a Hub dataset, a file, a folder or a glob. Raises UserError."""
    if path.startswith(HUB):
        dataset, size, digest = find_hub(hub or HubSource(path))
        return Found((Input(path, dataset, size, digest, None),))
    root, setting = Path(path), f"input={path}"
    if root.is_dir():
        found = in_folder(root, *visible_files(root))
    elif os.path.lexists(root):
        found = one_file(root)
    elif any(letter in path for letter in WILDCARDS):
        found = in_glob(path)
    else:
        raise UserError(f"{setting} does not exist: name a file {READABLE}, a folder or a glob of them")
    errors = [entry for entry in found.unread if entry.is_error]
    if errors and unreadable == "error":
        raise UserError(
            f"{setting} holds files that cannot be read: {in_words(errors)}; fix them or set unreadable=skip"
        )
    if not found.inputs:
        raise UserError(nothing_in(setting, [entry for entry in found.unread if entry.reason != HIDDEN]))
    return found


def nothing_in(setting: str, unread: Sequence[Unread]) -> str:
    """Describe an input without a file that can be read."""
    if errors := [entry for entry in unread if entry.is_error]:
        return f"{setting} holds nothing that can be read: {in_words(errors)}; fix it or name another"
    hint = remedy_for(unread[0].path) if unread else "name another"
    held = f", only {len(unread)} others such as {unread[0].path.name}" if unread else ""
    return f"{setting} holds no {READABLE}{held}: {hint}"


def one_file(path: Path) -> Found:
    """Return a file that is named itself. Raises UserError."""
    if (reason := problem_of(path)) is not None:
        raise UserError(f"input={path} cannot be read ({reason}); name a file {READABLE}, a folder or a glob")
    if kind_of(path) is None:
        raise UserError(f"input={path} is neither {READABLE}: {remedy_for(path)}")
    return Found((file_input(path, path.parent, None),))


def in_folder(root: Path, files: list[Path], unread: list[Unread]) -> Found:
    """Return the parts of a folder with train.*, else every readable file below it, sorted by path."""
    named: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for file in files:
        if file.parent == root and (part := part_name(file)) is not None:
            named[part].append(file)
    if not any(named.values()):
        return chosen(files, root, unread)
    if not named["train"]:
        held_out = next(file for some in named.values() for file in some)
        raise UserError(
            f"input={root} holds {held_out.name} but no train.jsonl or the like: add it, or name "
            f"the files of one corpus by a glob"
        )
    for split, candidates in named.items():
        if len(candidates) > 1:
            names = " and ".join(file.name for file in candidates)
            raise UserError(f"input={root} holds {names}, all for the part {split}: keep one of them")
    parts = {file for some in named.values() for file in some}
    others = [Unread(file, NO_PART) for file in files if file not in parts]
    # beside the parts nothing is read anyway
    unread = [e if is_part(e.path, root) else Unread(e.path, e.reason) for e in unread]
    found = chosen([file for split in SPLITS for file in named[split]], root, [*unread, *others])
    return Found(tuple(as_part(item) for item in found.inputs), found.unread)


def is_part(path: Path, root: Path) -> bool:
    """True for a file that is named after a part."""
    return path.parent == root and part_name(path) is not None


def as_part(item: Input) -> Input:
    """Return an input as the part that it is named after."""
    return Input(item.name, item.path, item.bytes, item.digest, part_name(Path(item.path)))


def in_glob(pattern: str) -> Found:
    """Return the files that a glob matches, sorted by path. Raises UserError."""
    first = min(pattern.find(letter) for letter in WILDCARDS if letter in pattern)
    paths = sorted(map(Path, glob.glob(pattern, recursive=True)))
    unread = list(unreadable_folders(pattern))
    files = [path for path in paths if not path.is_dir()]
    if not files and not unread:
        raise UserError(f"input={pattern} matches no file: quote it from the shell; ** descends into folders")
    kept, ours = list[Path](), dict[Path, set[str]]()
    for file in files:
        folder = file.parent
        if folder not in ours:
            ours[folder] = own_below(folder)
        if file.name in ours[folder]:
            unread.append(Unread(file, OWN))
        else:
            kept.append(file)
    return chosen(kept, Path(pattern[:first] + "x").parent, unread)


def own_below(folder: Path) -> set[str]:
    """Return the files of a folder that a build wrote; all of them in a stage of a build."""
    try:
        names = os.listdir(folder)
    except OSError:
        return set()
    whole = folder.name in own_names(folder.parent, (folder.name,))
    return set(names) if whole else own_names(folder, names)


def unreadable_folders(pattern: str) -> Iterator[Unread]:
    """Yield folders that a glob descends into and that cannot be listed: glob omits them silently."""
    parent = os.path.dirname(pattern)
    while parent:
        magic = glob.has_magic(parent)
        for folder in glob.glob(os.path.join(parent, ""), recursive=True) if magic else [parent]:
            try:
                os.scandir(folder).close()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                yield Unread(Path(folder), reason_of(error), is_error=True)
        if not magic:
            return
        parent = os.path.dirname(parent)


def chosen(files: Iterable[Path], root: Path, unread: Iterable[Unread]) -> Found:
    """Return the files that can be read as inputs, and the others with their reasons."""
    inputs, left = list[Input](), list(unread)
    for file in files:
        known = kind_of(file) is not None
        reason = problem_of(file, opened=known)
        if reason is not None:
            # a link that leads nowhere may have been one to a folder
            left.append(Unread(file, reason, is_error=known or not file.suffix))
        elif not known:
            left.append(Unread(file, UNKNOWN_FORMAT))
        else:
            inputs.append(file_input(file, root, None))
    return Found(tuple(inputs), tuple(sorted(left, key=lambda entry: entry.path)))


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
        own = own_names(folder, (*folders, *names))
        for name in (*folders, *names):
            if name in own:
                unread.append(Unread(folder / name, OWN))
            elif name.startswith("."):
                unread.append(Unread(folder / name, HIDDEN))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in own)
        files += [folder / name for name in names if not name.startswith(".") and name not in own]
    return sorted(files), unread


def problem_of(path: Path, *, opened: bool = True) -> str | None:
    """Return the reason why a file cannot be read, None if it can. `opened`: also try to open it."""
    try:
        mode = os.stat(path).st_mode
        for is_kind, name in SPECIAL_FILES:
            if is_kind(mode):
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


def file_input(path: Path, root: Path, split: str | None) -> Input:
    """Return a file as an input; its name is its path below `root`."""
    return Input(path.relative_to(root).as_posix(), str(path), path.stat().st_size, "", split)
