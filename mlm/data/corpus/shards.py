"""The inputs of a build, and how they are cut into shards: the pieces that tasks work on.

How an input is cut decides nothing but who reads what: the documents of all shards, one after the other, are
those of the inputs in their order.
"""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlm.config.data_schema import DataBuildConfig
from mlm.config.errors import UserError
from mlm.data.corpus.hub import HUB, HubSource, find_hub, hub_shards
from mlm.data.corpus.records import Input, Shard
from mlm.data.corpus.tables import row_ranges
from mlm.data.parts import SPLITS

__all__ = ["Found", "Input", "Shard", "cut", "find_all", "find_inputs", "kind_of", "search"]

COMPRESSED = (".gz", ".zst")
LINES = (".jsonl", ".txt")
READABLE = ".jsonl, .txt (also .gz, .zst) or .parquet"
WILDCARDS = "*?["


@dataclass(frozen=True)
class Found:
    """What lies below an input path."""

    inputs: tuple[Input, ...]
    passed_over: tuple[Path, ...]
    """Files that are not read: of a format we do not know, or not a part of the corpus."""

    def warning(self) -> str | None:
        """One line on what is not read, None when all is."""
        if not self.passed_over:
            return None
        names = ", ".join(path.name for path in self.passed_over[:5])
        rest = len(self.passed_over) - 5
        more = f" and {rest} more" if rest > 0 else ""
        return f"not read: {names}{more} (neither {READABLE}, nor a part train, validation or test)"


def find_inputs(config: DataBuildConfig) -> list[Input]:
    """The inputs of a build in corpus order. Raises UserError when there are none, or two for one part."""
    return list(find_all(config).inputs)


def find_all(config: DataBuildConfig) -> Found:
    """The inputs of a build, and the files beside them that are not read. Raises UserError."""
    return search(
        config.input, HubSource(config.input, config.hub_config, config.hub_split, config.hub_revision)
    )


def search(path: str, hub: HubSource | None = None) -> Found:
    """What an `input=` names: a Hub dataset, a file, a folder or a glob. Raises UserError."""
    if path.startswith(HUB):
        dataset, size, digest = find_hub(hub or HubSource(path))
        return Found((Input(path, dataset, size, digest, None),), ())
    root = Path(path)
    if root.is_dir():
        return in_folder(root)
    if root.is_file():
        if kind_of(root) is None:
            raise UserError(f"input={root} is neither {READABLE}: {remedy_for(root)}")
        return Found((file_input(root, root.parent, None),), ())
    if any(letter in path for letter in WILDCARDS):
        return in_glob(path)
    raise UserError(f"input={root} does not exist: name a file {READABLE}, a folder or a glob of them")


def in_folder(root: Path) -> Found:
    """The parts in a folder that has train.*, else every file below it that can be read, sorted by path."""
    files = visible_files(root)
    named = {
        split: [file for file in files if file.parent == root and part_name(file) == split]
        for split in SPLITS
    }
    if not any(named.values()):
        return chosen(files, root, f"input={root}")
    if not named["train"]:
        held_out = next(file for file in files if part_name(file) and file.parent == root)
        raise UserError(
            f"input={root} holds {held_out.name} but no train.jsonl or the like: add it, or name "
            f"the files of one corpus by a glob"
        )
    for split, candidates in named.items():
        if len(candidates) > 1:
            names = " and ".join(file.name for file in candidates)
            raise UserError(f"input={root} holds {names}, all for the part {split}: keep one of them")
    parts = [file_input(file, root, split) for split in SPLITS for file in named[split]]
    read = {part.path for part in parts}
    return Found(tuple(parts), tuple(file for file in files if str(file) not in read))


def in_glob(pattern: str) -> Found:
    """The files that a glob names, sorted by path."""
    fixed = Path(
        pattern[: min(pattern.find(letter) for letter in WILDCARDS if letter in pattern)] + "x"
    ).parent
    files = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
    if not files:
        raise UserError(f"input={pattern} names no file: quote it from the shell, ** goes through folders")
    return chosen(files, fixed, f"input={pattern}")


def chosen(files: Sequence[Path], root: Path, setting: str) -> Found:
    """Those files that can be read. Raises UserError when there are none."""
    known = [file for file in files if kind_of(file) is not None]
    if not known:
        hint = remedy_for(files[0]) if files else "name another"
        held = f", only {len(files)} others such as {files[0].name}" if files else ""
        raise UserError(f"{setting} holds no {READABLE}{held}: {hint}")
    unknown = tuple(file for file in files if kind_of(file) is None)
    return Found(tuple(file_input(file, root, None) for file in known), unknown)


def visible_files(root: Path) -> list[Path]:
    """All files below a folder but hidden ones, sorted by path; links to folders are followed, once each."""
    files, seen = list[Path](), set[str]()
    for folder, folders, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        files += [path for path in paths if path.is_file()]
    return sorted(files)


def kind_of(path: Path) -> str | None:
    """How a file is read, by its name: jsonl.gz for a.jsonl.gz; None for what we do not know."""
    name = path.name.lower()
    packing = next((suffix for suffix in COMPRESSED if name.endswith(suffix)), "")
    suffix = Path(name.removesuffix(packing)).suffix
    if suffix in LINES:
        return (suffix + packing).removeprefix(".")
    return "parquet" if suffix == ".parquet" and not packing else None


def part_name(path: Path) -> str | None:
    """The part a readable file is named after: train of train.jsonl.gz."""
    stem = path.name.partition(".")[0]
    return (
        stem if stem in SPLITS and kind_of(path) and path.name.lower() == f"{stem}.{kind_of(path)}" else None
    )


def remedy_for(path: Path) -> str:
    """What to do about a file that cannot be read."""
    if path.suffix.lower() == ".json":
        return "a .json file is one value; write one object per line and call it .jsonl"
    return "rename it to what it holds, or convert it"


def file_input(path: Path, root: Path, split: str | None) -> Input:
    """A file as an input; its name is its path below `root`."""
    return Input(path.relative_to(root).as_posix(), str(path), path.stat().st_size, "", split)


def cut(inputs: Iterable[Input], shard_bytes: int) -> list[Shard]:
    """The shards of the inputs in corpus order, at least one for each input.

    Uncompressed .jsonl is cut every `shard_bytes` bytes (a line belongs where its first byte lies), Parquet
    where row groups begin; a .txt or compressed file is one shard. Raises UserError.
    """
    assert shard_bytes > 0, shard_bytes
    return [shard for item in inputs for shard in shards_of(item, shard_bytes)]


def shards_of(item: Input, shard_bytes: int) -> Iterator[Shard]:
    """The shards of one input."""
    kind = "hub" if item.path.startswith(HUB) else kind_of(Path(item.path))
    assert kind is not None, item.path
    if kind == "hub":
        ranges = [(index, index + 1) for index in range(hub_shards(item.path))]
    elif kind == "parquet":
        ranges = row_ranges(item.path, shard_bytes)
    else:
        step = shard_bytes if kind == "jsonl" else max(item.bytes, 1)
        ranges = [(begin, min(begin + step, item.bytes)) for begin in range(0, max(item.bytes, 1), step)]
    for begin, end in ranges:
        yield Shard(item.path, kind, begin, end, item.split)
