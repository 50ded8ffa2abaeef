"""Reading documents: JSON lines or plain text, one document in memory at a time."""

import json
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from mlm.config.errors import UserError

SPLITS = ("train", "validation", "test")
SUFFIXES = (".jsonl", ".txt")
TEXT_END = b"<|endoftext|>"
"""A line of a .txt file that holds just this ends a document."""


@dataclass(frozen=True)
class Source:
    """One input file. `split` is the part it belongs to, None when its documents are divided."""

    path: Path
    split: str | None


@dataclass(frozen=True)
class Document:
    """One text and where it came from."""

    text: str
    num_bytes: int
    """Bytes of the text in UTF-8."""
    end: int
    """Bytes of the file read up to the end of this document."""


def find_sources(path: str) -> list[Source]:
    """The files to read below `path`. Raises UserError when there are none, or two for one part."""
    root = Path(path)
    if root.is_dir():
        sources = [source for split in SPLITS for source in split_files(root, split)]
        if not any(source.split == "train" for source in sources):
            raise UserError(
                f"input={root} holds no train.jsonl or train.txt: name a folder that does, or a file"
            )
        return sources
    if not root.is_file():
        raise UserError(
            f"input={root} does not exist: name a .jsonl or .txt file, or a folder with train.jsonl"
        )
    if root.suffix not in SUFFIXES:
        raise UserError(f"input={root} is neither .jsonl nor .txt: rename it to what it holds")
    return [Source(root, None)]


def split_files(root: Path, split: str) -> list[Source]:
    """The file of one part in a folder: none or one."""
    files = [root / f"{split}{suffix}" for suffix in SUFFIXES if (root / f"{split}{suffix}").is_file()]
    if len(files) > 1:
        raise UserError(f"input={root} holds both {files[0].name} and {files[1].name}: keep one of them")
    return [Source(file, split) for file in files]


def read_documents(path: Path, text_key: str) -> Iterator[Document]:
    """Documents of a .jsonl or .txt file in their order.

    Raises UserError naming file and line for a line that is no JSON object, lacks `text_key` or is no UTF-8.
    """
    return read_jsonl(path, text_key) if path.suffix == ".jsonl" else read_text(path)


def read_jsonl(path: Path, text_key: str) -> Iterator[Document]:
    """One document per line. Empty lines are passed over."""
    end = 0
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            end += len(line)
            if line.strip():
                text = json_text(line, f"{path}:{number}", text_key)
                yield Document(text, utf8_length(text, f"{path}:{number}"), end)


def json_text(line: bytes, place: str, text_key: str) -> str:
    """The text of one JSON line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8 too
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise UserError(f"{place}: not a line of JSON ({reason}): mend or delete it") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: a JSON {type(record).__name__}, not an object: mend or delete it")
    if text_key not in record:
        keys = ", ".join(map(str, record)) or "none"
        raise UserError(
            f'{place}: no key "{text_key}" (its keys: {keys}): set text_key to the one with the text'
        )
    text = record[text_key]
    if not isinstance(text, str):
        raise UserError(
            f'{place}: "{text_key}" holds a {type(text).__name__}, not a string: mend or delete it'
        )
    return text


def read_text(path: Path) -> Iterator[Document]:
    """Documents end at a line that holds only <|endoftext|>; without one the file is one document."""
    end, start, lines = 0, 1, list[bytes]()
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            end += len(line)
            if line.strip() == TEXT_END:
                yield text_document(b"".join(lines), f"{path}:{start}", end)
                start, lines = number + 1, []
            else:
                lines.append(line)
    if lines:
        yield text_document(b"".join(lines), f"{path}:{start}", end)


def text_document(content: bytes, place: str, end: int) -> Document:
    """A plain-text document; `place` is its first line."""
    try:
        return Document(content.decode("utf-8"), len(content), end)
    except UnicodeDecodeError as error:
        path, _, first = place.rpartition(":")
        line = int(first) + content.count(b"\n", 0, error.start)
        raise UserError(f"{path}:{line}: not UTF-8 ({error.reason}): convert the file to UTF-8") from error


def utf8_length(text: str, place: str) -> int:
    """Bytes of a text. JSON can spell half a surrogate pair, which no UTF-8 holds."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: half a surrogate pair at letter {error.start}: mend or delete it"
        ) from error


def parse_split(text: str) -> tuple[float, ...]:
    """Shares of train, validation and test. Raises UserError unless they are three and sum to 1."""
    try:
        shares = tuple(float(share) for share in text.replace("/", ",").split(","))
    except ValueError:
        shares = ()
    sound = len(shares) == len(SPLITS) and all(0 <= share <= 1 for share in shares) and shares[0] > 0
    if not sound or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise UserError(
            f"split={text} is not three shares that sum to 1: write for instance split=0.98/0.01/0.01"
        )
    return shares


def part_of(document: int, shares: Iterable[float], seed: int) -> str:
    """The part a document falls in: a function of (seed, number of the document) alone."""
    draw = xxhash.xxh3_64_intdigest(struct.pack("<Qq", seed % (1 << 64), document)) / 2**64
    bound, part = 0.0, SPLITS[0]
    for name, share in zip(SPLITS, shares, strict=True):
        if share > 0:
            bound, part = bound + share, name
            if draw < bound:
                return part
    return part  # the shares sum to a hair less than 1
