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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
SHARD = "a.safetensors"


class Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


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
CASES: dict[str, tuple[str, Callable[[Path], object] | bytes]] = {
    "manifest of a terabyte": (MANIFEST, lambda p: sparse(p, b"{", 1 << 40)),
    "manifest of brackets": (MANIFEST, b"[" * (4 * MIB)),
    "manifest with a number of 5000 digits": (MANIFEST, b'{"format":1' + b"0" * 5000 + b"}"),
    "manifest with a number beyond floats": (MANIFEST, signed(PLAIN)[:-1] + b',"x":1e999}'),
    "manifest with a key twice": (MANIFEST, b'{"step":2,' + signed(PLAIN)[1:]),
    "manifest with a negative offset": (MANIFEST, signed(manifest_of([2], [[-1]], [2]))),
    "manifest whose chunks unpack to more than the limit": (MANIFEST, signed(PLAIN | {"chunks": BOMB})),
    "manifest of an enormous shape": (MANIFEST, signed(manifest_of([2**62] * 32, [], []))),
    "manifest of too many dims": (MANIFEST, signed(manifest_of([1] * 33, [], []))),
    "manifest whose tensor's name moves the cursor": (
        MANIFEST,
        signed({**PLAIN, "tensors": {"w\x1b[2J\n": PLAIN["tensors"]["w"]}}),
    ),
    "chunks that overlap, all along one dim": (
        MANIFEST,
        lambda p: p.write_bytes(signed(manifest_of([1, COUNT + 1], ROW, [1, 2]))),
    ),
    "chunks that tile in columns": (
        MANIFEST,
        lambda p: p.write_bytes(signed(manifest_of([1, COUNT], ROW, [1, 1]))),
    ),
    "shard with a header of brackets": (SHARD, HEADER_SIZE + b"[" * (4 * MIB)),
    "shard whose header says 2^63 bytes": (SHARD, (1 << 63).to_bytes(8, "little")),
    "shard of a terabyte that says it is header": (
        SHARD,
        lambda p: sparse(p, (1 << 39).to_bytes(8, "little"), 1 << 40),
    ),
    "shard with an enormous shape": (
        SHARD,
        with_length(
            json.dumps({"w": {"dtype": "F32", "shape": [2**62] * 32, "data_offsets": [0, 2**70]}}).encode()
        ),
    ),
    "shard with a tensor twice": (SHARD, with_length(b'{"__metadata__":{"save_id":"x"},"w":1,"w":2}')),
    "pipe named latest": ("latest", os.mkfifo),
    "index of 2^60 documents": ("c.idx", lambda p: index(p, 1 << 60)),
    "index whose size overflows": ("c.idx", lambda p: index(p, (1 << 64) - 1)),
    "receipt of a terabyte": ("corpus.json", lambda p: sparse(p, b"{", 1 << 40)),
    "receipt of brackets": ("corpus.json", b"[" * MIB),
    "receipt of other kinds": ("corpus.json", b'{"vocab_size": 1, "splits": [], "files": 3}'),
    "receipt of files elsewhere": ("corpus.json", b'{"vocab_size": 1, "files": {"../../etc/passwd": {}}}'),
    "tokenizer of a terabyte": ("tokenizer.json", lambda p: sparse(p, b"{", 1 << 40)),
    "tokenizer of brackets": ("tokenizer.json", b'{"version":' + b"[" * MIB),
    "tokenizer that makes its library panic": (
        "tokenizer.json",
        b'{"version":"1.0","normalizer":{"type":"Precompiled","precompiled_charsmap":"AAAA"},'
        b'"model":{"type":"Unigram","vocab":[],"unk_id":7}}',
    ),
    "vocabulary of a terabyte": (
        "vocab.json",
        lambda p: [sparse(p, b"{", 1 << 40), p.with_name("merges.txt").touch()],
    ),
    "cached order of an enormous shape": (
        "c.npy",
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1" + "0" * 30 + ",), }"),
    ),
    "cached order with a header of brackets": ("c.npy", npy("(" * 9000)),
    "metrics of a terabyte": ("metrics.jsonl", lambda p: sparse(p, b"{}\n", 1 << 40)),
    "metrics of brackets": ("metrics.jsonl", b"[" * MIB + b"\n"),
}
"""Name and content (bytes, or a function of the path) of each file."""
READERS: dict[str, Callable[[Path], object]] = {
    MANIFEST: lambda p: read_manifest(p.parent),
    SHARD: read_shard,
    "latest": lambda p: latest_checkpoint(p.parent),
    "c.idx": lambda p: IndexedDataset(p.with_suffix("")),
    "corpus.json": lambda p: read_receipt(p.parent),
    "tokenizer.json": Tokenizer.load,
    "vocab.json": lambda p: Tokenizer.load(p.parent),
    "c.npy": load_checked,
    "metrics.jsonl": lambda p: [list(read_records(p)), rewind(p, 1)],
}


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
        name, content = CASES[case]
        report = folder / f"{number}.txt"
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            report.write_text(outcome(content, READERS[name], folder / str(number) / name))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        results[case] = report.read_text() if status == 0 else f"died with status {status}"
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
