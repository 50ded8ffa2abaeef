"""Formats of input files, told by their names."""

from pathlib import Path

from mlm.data.parts import SPLITS

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
LINES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "txt"}
READABLE = ".jsonl, .ndjson, .txt (also .gz, .zst, .bz2, .xz), .json.gz or .parquet"


def kind_of(path: Path) -> str | None:
    """Format of a file: jsonl.gz for a.ndjson.gz; None for an unknown format."""
    return formats(path)[1]


def formats(path: Path) -> tuple[str, str | None]:
    """The name without the endings that tell its format, and that format.

    A compressed .json holds one object per line wherever it is published (C4, The Pile); a plain .json is
    one value more often than not, and is not read.
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
    """The part a readable file is named after: train of train.jsonl.gz."""
    stem, kind = formats(path)
    return stem if kind is not None and stem in SPLITS and path.name.startswith(stem) else None


def remedy_for(path: Path) -> str:
    """A fix for a file that cannot be read."""
    if path.suffix.lower() == ".json":
        return "a .json file is one value; write one object per line and call it .jsonl"
    return "rename it to what it holds, or convert it"
