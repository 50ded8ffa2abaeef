"""Hostile files: pickles that leave a marker when loaded, and files made to fill memory or time.

`python -m tests.hostile.files FOLDER [CASE …]` reads the latter, each in a process of its own under limits,
and prints a JSON object: case → "refused: …", "read" or what else became of it.
"""

import io
import json
import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlm.checkpoint.native.columns import Chunk, columns_of, encode_columns
from mlm.checkpoint.native.folders import latest_checkpoint
from mlm.checkpoint.native.format import MANIFEST, FileEntry, canonical, pack, read_manifest
from mlm.checkpoint.native.reader import CheckedFile, read_header
from mlm.checkpoint.native.slices import Region
from mlm.data.epochs import load_checked
from mlm.data.indexed import HEADER, MAGIC, IndexedDataset
from mlm.data.receipt import read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.tracking.history import read_records, rewind
from mlm.util.errors import UserError
from mlm.util.files import digest_bytes

MEMORY = 1 << 30  # bytes a reader may add to what the process has: 1 GiB
SECONDS = 20  # of processor time; the slowest takes about 5
MIB = 1 << 20
DIGEST = f"xxh3:{'0' * 32}"


class Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def one_in_four(cases: Iterable[str]) -> list[Any]:
    """Mark all cases but every fourth as slow."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (n % 4 > 0)) for n, case in enumerate(cases)]


def payloads(marker: Path) -> dict[str, bytes]:
    """Files that make the directory `marker` when a reader unpickles them."""
    bomb = Bomb(marker)
    found = {f"protocol {number}": pickle.dumps(bomb, number) for number in range(6)}
    for name, zipped in (("torch zip", True), ("torch before 1.6", False)):
        file = io.BytesIO()
        torch.save({"model": bomb}, file, _use_new_zipfile_serialization=zipped)
        found[name] = file.getvalue()
    file = io.BytesIO()
    np.save(file, np.array([bomb], dtype=object), allow_pickle=True)
    return {**found, "numpy objects": file.getvalue()}


SPLIT = {"tp_dim": None, "stage": "first", "multiple": 1}


def manifest_of(shape: list[int], offsets: list[list[int]], size: list[int]) -> dict[str, Any]:
    """A manifest of one tensor, in chunks of `size` at these offsets: each in a file of 8 bytes."""
    names = [f"{number:06d}.safetensors" for number in range(len(offsets))]
    chunks = [Chunk(name, Region(tuple(o), tuple(size))) for name, o in zip(names, offsets, strict=True)]
    dims = tuple(shape[: len(size)] if offsets else [0])
    return {
        "format": "mlm-checkpoint",
        "version": 1,
        "step": 1,
        "save_id": "x",
        "files": {name: {"bytes": 8, "digest": DIGEST, "blocks": [DIGEST]} for name in names},
        "tensors": {"w": {"shape": shape, "dtype": "F32", "split": SPLIT, "norms": None}},
        "chunks": pack(encode_columns(columns_of([dims], [chunks], names))),
        "state": {},
    }


def signed(body: dict[str, Any]) -> bytes:
    """A manifest with the digest that belongs to it."""
    return canonical({**body, "digest": digest_bytes(canonical(body))})


def sparse(path: Path, head: bytes, size: int) -> None:
    """A file of `size` bytes that takes no room on disk."""
    with open(path, "wb") as f:
        f.write(head)
        f.truncate(size)


def read_shard(path: Path) -> object:
    """The header of a shard whose manifest lists its true size."""
    size = path.stat().st_size
    with CheckedFile(path, FileEntry(size, "", ())) as f:
        return read_header(f, "x")


def read_folder(path: Path) -> object:
    """The manifest of a checkpoint, given the manifest's path."""
    return read_manifest(path.parent)


def index(path: Path, count: int) -> None:
    """An .idx that claims so many sequences and documents, and a .bin."""
    path.write_bytes(HEADER.pack(MAGIC, 1, 8, count, count))
    path.with_suffix(".bin").touch()


def with_length(text: bytes) -> bytes:
    """A shard file of a header alone."""
    return len(text).to_bytes(8, "little") + text


def npy(header: str) -> bytes:
    """An .npy file with this header."""
    text = f"{header}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)


COUNT = 40_000
PLAIN = manifest_of([0], [], [])  # sound
ROW = [[0, number] for number in range(COUNT)]
BOMB = pack(bytes((1 << 28) + 40))
HEADER_SIZE = (4 * MIB).to_bytes(8, "little")
Case = tuple[str, Callable[[Path], object] | bytes, Callable[[Path], object]]
CASES: dict[str, Case] = {
    "manifest of a terabyte": (MANIFEST, lambda p: sparse(p, b"{", 1 << 40), read_folder),
    "manifest of brackets": (MANIFEST, b"[" * (4 * MIB), read_folder),
    "manifest with a number of 5000 digits": (MANIFEST, b'{"format":1' + b"0" * 5000 + b"}", read_folder),
    "manifest with a number beyond floats": (MANIFEST, signed(PLAIN)[:-1] + b',"x":1e999}', read_folder),
    "manifest with a key twice": (MANIFEST, b'{"step":2,' + signed(PLAIN)[1:], read_folder),
    "manifest with a negative offset": (MANIFEST, signed(manifest_of([2], [[-1]], [2])), read_folder),
    "manifest whose chunks unpack to more than the limit": (
        MANIFEST,
        signed(PLAIN | {"chunks": BOMB}),
        read_folder,
    ),
    "manifest of an enormous shape": (MANIFEST, signed(manifest_of([2**62] * 32, [], [])), read_folder),
    "manifest of too many dims": (MANIFEST, signed(manifest_of([1] * 33, [], [])), read_folder),
    "manifest whose tensor's name moves the cursor": (
        MANIFEST,
        signed({**PLAIN, "tensors": {"w\x1b[2J\n": PLAIN["tensors"]["w"]}}),
        read_folder,
    ),
    "chunks that overlap, all along one dim": (
        MANIFEST,
        lambda p: p.write_bytes(signed(manifest_of([1, COUNT + 1], ROW, [1, 2]))),
        read_folder,
    ),
    "chunks that tile in columns": (
        MANIFEST,
        lambda p: p.write_bytes(signed(manifest_of([1, COUNT], ROW, [1, 1]))),
        read_folder,
    ),
    "shard with a header of brackets": (
        "a.safetensors",
        HEADER_SIZE + b"[" * (4 * MIB),
        read_shard,
    ),
    "shard whose header says 2^63 bytes": ("a.safetensors", (1 << 63).to_bytes(8, "little"), read_shard),
    "shard of a terabyte that says it is header": (
        "a.safetensors",
        lambda p: sparse(p, (1 << 39).to_bytes(8, "little"), 1 << 40),
        read_shard,
    ),
    "shard with an enormous shape": (
        "a.safetensors",
        with_length(
            json.dumps({"w": {"dtype": "F32", "shape": [2**62] * 32, "data_offsets": [0, 2**70]}}).encode()
        ),
        read_shard,
    ),
    "shard with a tensor twice": (
        "a.safetensors",
        with_length(b'{"__metadata__":{"save_id":"x"},"w":1,"w":2}'),
        read_shard,
    ),
    "pipe named latest": ("latest", lambda p: os.mkfifo(p), lambda p: latest_checkpoint(p.parent)),
    "index of 2^60 documents": (
        "c.idx",
        lambda p: index(p, 1 << 60),
        lambda p: IndexedDataset(p.with_suffix("")),
    ),
    "index whose size overflows": (
        "c.idx",
        lambda p: index(p, (1 << 64) - 1),
        lambda p: IndexedDataset(p.with_suffix("")),
    ),
    "receipt of a terabyte": (
        "corpus.json",
        lambda p: sparse(p, b"{", 1 << 40),
        lambda p: read_receipt(p.parent),
    ),
    "receipt of brackets": ("corpus.json", b"[" * MIB, lambda p: read_receipt(p.parent)),
    "receipt of other kinds": (
        "corpus.json",
        b'{"vocab_size": 1, "splits": [], "files": 3}',
        lambda p: read_receipt(p.parent),
    ),
    "receipt of files elsewhere": (
        "corpus.json",
        b'{"vocab_size": 1, "files": {"../../etc/passwd": {}}}',
        lambda p: read_receipt(p.parent),
    ),
    "tokenizer of a terabyte": ("tokenizer.json", lambda p: sparse(p, b"{", 1 << 40), Tokenizer.load),
    "tokenizer of brackets": ("tokenizer.json", b'{"version":' + b"[" * MIB, Tokenizer.load),
    "tokenizer that makes its library panic": (
        "tokenizer.json",
        b'{"version":"1.0","normalizer":{"type":"Precompiled","precompiled_charsmap":"AAAA"},'
        b'"model":{"type":"Unigram","vocab":[],"unk_id":7}}',
        Tokenizer.load,
    ),
    "vocabulary of a terabyte": (
        "vocab.json",
        lambda p: [sparse(p, b"{", 1 << 40), p.with_name("merges.txt").touch()],
        lambda p: Tokenizer.load(p.parent),
    ),
    "cached order of an enormous shape": (
        "c.npy",
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1" + "0" * 30 + ",), }"),
        load_checked,
    ),
    "cached order with a header of brackets": ("c.npy", npy("(" * 9000), load_checked),
    "metrics of a terabyte": (
        "metrics.jsonl",
        lambda p: sparse(p, b"{}\n", 1 << 40),
        lambda p: list(read_records(p)),
    ),
    "metrics of brackets": ("metrics.jsonl", b"[" * MIB + b"\n", lambda p: rewind(p, 1)),
}
"""Name, content (bytes, or a function of the path) and reader of each file."""


def outcome(content: Callable[[Path], object] | bytes, read: Callable[[Path], object], path: Path) -> str:
    """Result of one case."""
    path.parent.mkdir()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    del content
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    try:
        read(path)
    except UserError as error:
        lines = str(error).splitlines()
        return f"refused: {lines[0][:300]}" if len(lines) == 1 else f"in {len(lines)} lines"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]
    return "read"


def main(folder: Path, cases: list[str]) -> None:
    results = {}
    for number, case in enumerate(cases):
        name, content, read = CASES[case]
        report = folder / f"{number}.txt"
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            report.write_text(outcome(content, read, folder / str(number) / name))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        results[case] = report.read_text() if status == 0 else f"died with status {status}"
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
