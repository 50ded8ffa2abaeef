"""Corpora in an object store: local copies of all files except tokens, which are read in blocks.

A copy is a folder in `data.cache` for one state of a corpus: index, receipt and tokenizer, and instead of
PREFIX.bin a PREFIX.bin.json that points to the object. Blocks of tokens are cached next to it, for all ranks
of a host and for resumed runs. An incomplete block is read again.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray
from xxhash import xxh3_128, xxh3_128_digest

from mlm.data.config import SPLITS
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import (
    digest_bytes,
    digest_name,
    digest_samples,
    dump_json,
    parse_json,
    read_bounded,
    write_atomic,
)
from mlm.util.object_store import (
    StoredObject,
    explain_store_errors,
    list_objects,
    open_object,
    read_ranges,
)

REMAKE = "delete its folder, which is made again"
BLOCK = 1 << 18  # bytes of a request: 256 KiB, about what a store sends while it answers
DIGEST = 16  # bytes of a block's digest, which ends its file
SLACK = 64  # the cached blocks are measured after a process has added limit / SLACK bytes
BYTES = np.dtype("u1")


@cache
def copy_locally(url: str, cache: str, limit: int) -> Path:
    """Make the local copy of a corpus; return the prefix of its training part. `limit` is in bytes.

    `url` is a folder with train.bin and .idx, or the prefix of a pair; train.bin and .idx stand for their
    folder. Raises UserError.
    """
    folder = url.rstrip("/")
    objects, part = _corpus_files(folder, SPLITS), SPLITS[0]
    if not objects:
        folder, _, part = folder.rpartition("/")
        objects = _corpus_files(folder, SPLITS if part == SPLITS[0] else (part,))
    if not objects:
        problem = f"neither train.bin and train.idx in it, nor {part}.bin and {part}.idx"
        raise UserError(f"data: {url}: {problem}; name a folder or prefix that holds a corpus")
    identity = digest_bytes(dump_json({name: asdict(stored) for name, stored in objects.items()}))
    copy = Path(cache, identity.removeprefix("xxh3:")[:16], folder.rpartition("/")[2])
    with writing_cache(copy):
        copy.mkdir(parents=True, exist_ok=True)
        for name, stored in objects.items():
            path = copy / name
            if name.endswith(".bin"):
                write_atomic(stored_pointer(path), dump_json(asdict(stored) | {"limit": limit}))
            elif not path.is_file() or path.stat().st_size != stored.bytes:
                write_atomic(path, partial(_download, stored))
    return copy / part


def _download(stored: StoredObject, f: BinaryIO) -> None:
    """Write the content of an object to a file. Raises UserError of the store, OSError of the file."""

    def blocks() -> Iterator[bytes]:
        with explain_store_errors(stored.url), open_object(stored.url, stored.etag) as content:
            while block := content.read(BLOCK):
                yield block

    f.writelines(blocks())


@contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """Convert an OSError of writing below data.cache to a UserError."""
    try:
        yield
    except OSError as error:
        problem = f"data.cache: {error.filename or folder}: {error.strerror}"
        raise UserError(f"{problem}; name a folder with room in it that this user may write") from error


def _corpus_files(folder: str, parts: Sequence[str]) -> dict[str, StoredObject]:
    """Return the files of these parts in a folder, with receipt and tokenizer; {} without the first part."""
    listed = {stored.url.rpartition("/")[2]: stored for stored in list_objects(folder, depth=1)}
    if not {f"{parts[0]}.bin", f"{parts[0]}.idx"} <= listed.keys():
        return {}
    names = {"corpus.json", "tokenizer.json", *(f"{part}{end}" for part in parts for end in (".bin", ".idx"))}
    return {name: listed[name] for name in sorted(names & listed.keys())}


def stored_pointer(bin_path: Path) -> Path:
    """Return the path of the file that replaces a .bin in a local copy."""
    return bin_path.with_name(f"{bin_path.name}.json")


def stored_tokens(bin_path: Path, dtype: np.dtype[Any] = BYTES) -> "StoredTokens | None":
    """Return the tokens of a .bin in a store; None if the .bin is local, or there is no pointer to it.

    Raises CorruptFileError, and UserError if blocks cannot be cached.
    """
    pointer = stored_pointer(bin_path)
    if bin_path.is_file() or not pointer.is_file():
        return None
    try:
        fields = parse_json(read_bounded(pointer, 1 << 16, REMAKE))
        limit, source = int(fields.pop("limit")), StoredObject(**fields)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CorruptFileError(f"{pointer} points to no object: {REMAKE}") from error
    return StoredTokens(source, dtype, limit, pointer.with_suffix(".blocks"))


class StoredTokens:
    """Tokens of an object as a read-only array, indexed by a slice, or by positions of any shape.

    Up to `limit` bytes of its blocks are cached in `folder`. Raises UserError if the store cannot be read, or
    a block cannot be cached.
    """

    def __init__(self, source: StoredObject, dtype: np.dtype[Any], limit: int, folder: Path) -> None:
        self.source, self.dtype, self.limit, self.folder = source, dtype, limit, folder
        self.width = BLOCK // dtype.itemsize  # tokens of a block
        with writing_cache(folder):
            folder.mkdir(exist_ok=True)
        self._added = 0

    def __len__(self) -> int:
        return self.source.bytes // self.dtype.itemsize

    def __getitem__(self, index: "slice | ArrayLike") -> NDArray[Any]:
        positions = np.arange(*index.indices(len(self))) if isinstance(index, slice) else np.asarray(index)
        blocks, row = np.unique(positions // self.width, return_inverse=True)
        content = self._read(blocks).view(self.dtype)
        tokens: NDArray[Any] = content[row.reshape(positions.shape), positions % self.width]
        return tokens

    def load(self, begin: NDArray[np.int64], length: NDArray[np.int64]) -> None:
        """Prefetch runs of tokens for subsequent slices. begin, length: int64 of the same shape."""
        first, last = begin // self.width, (begin + np.maximum(length, 1) - 1) // self.width
        runs = [np.arange(a, b + 1) for a, b in zip(first.flat, last.flat, strict=True)]
        blocks = np.unique(np.concatenate(runs)) if runs else ()
        self._fetch([block for block in blocks if not self._path(block).exists()])

    def digest(self) -> str:
        """Return what `files.digest_file` returns of the same tokens in a file. Reads all of them."""
        h, step = xxh3_128(), 16 * self.width
        for begin in range(0, len(self), step):
            h.update(self[begin : begin + step].tobytes())
        return digest_name(h)

    def sampled_digest(self) -> str:
        """Return what `files.sampled_digest` returns of the same tokens in a file."""

        def read(begin: int, count: int) -> bytes:
            first, last = begin // BLOCK, (begin + count - 1) // BLOCK
            content = self._read(np.arange(first, last + 1)).reshape(-1)
            return content[begin - first * BLOCK :][:count].tobytes()

        return digest_samples(self.source.bytes, read)

    def _read(self, blocks: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return blocks, cached or fetched: [n, BLOCK], zeros after the end of the object."""
        content, missing = np.zeros((len(blocks), BLOCK), dtype=np.uint8), list[int]()
        for row, number in enumerate(blocks):
            try:
                cached = np.fromfile(self._path(number), dtype=np.uint8)
            except FileNotFoundError:
                missing.append(row)
                continue
            cached, digest = cached[:-DIGEST], cached[-DIGEST:]
            is_whole = len(cached) == min(BLOCK, self.source.bytes - number * BLOCK)
            if is_whole and xxh3_128_digest(cached.data) == digest.tobytes():
                content[row, : len(cached)] = cached
            else:
                missing.append(row)
        for row, fetched in zip(missing, self._fetch(blocks[missing]), strict=True):
            content[row, : len(fetched)] = np.frombuffer(fetched, dtype=np.uint8)
        return content

    def _path(self, block: int) -> Path:
        return self.folder / f"{block:08d}"

    def _fetch(self, blocks: "Sequence[int] | NDArray[np.int64]") -> list[bytes]:
        if not len(blocks):
            return []
        contents = read_ranges(self.source, [int(block) * BLOCK for block in blocks], BLOCK)
        with writing_cache(self.folder):
            for block, content in zip(blocks, contents, strict=True):
                partial = self.folder / f".{block}.{os.getpid()}.{get_ident()}"
                with open(partial, "wb") as f:
                    f.write(content + xxh3_128_digest(content))
                with suppress(FileNotFoundError):  # another rank has deleted it to make room
                    os.replace(partial, self._path(block))
        self._added += len(blocks) * BLOCK
        if self._added * SLACK <= self.limit:
            return contents
        # Delete the oldest until there is room for what eight ranks add before the next measurement.
        self._added, files = 0, list[tuple[int, int, str]]()
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # another rank deletes too
                status = entry.stat()
                files.append((status.st_mtime_ns, status.st_size, entry.path))
        excess = sum(size for _, size, _ in files) - self.limit * (SLACK - 8) // SLACK
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            excess -= size
        return contents
