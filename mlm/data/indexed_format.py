"""Megatron's indexed corpus: `PREFIX.bin` holds the tokens, `PREFIX.idx` says where each sequence lies.

Byte-compatible with Megatron-LM both ways. Everything is little-endian.

    .idx   9 bytes "MMIDIDX\\0\\0" · u64 version = 1 · u8 dtype code · u64 sequences n · u64 documents + 1
           then i32 lengths [n] (tokens), i64 pointers [n] (byte offsets in .bin),
           i64 document indices [documents + 1] (first sequence of each document, then n)
    .bin   the tokens of all sequences, one after another

A GPT corpus holds one sequence per document, a BERT corpus one per sentence.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.errors import CorruptFileError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)
}
CHUNK = 1 << 20  # entries looked at at a time: constant memory
LONGEST = (1 << 31) - 1  # tokens of a sequence: lengths are i32
LENGTH, POSITION = struct.Struct("<i"), struct.Struct("<q")  # an entry of lengths, of the two others
REBUILD = "write it again with `mlm data build`"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Format of one token on disk: u16 for a vocabulary below 65,500, else i32 (Megatron's rule)."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


def bin_path(prefix: Path) -> Path:
    """Where the tokens of a corpus lie."""
    return prefix.with_name(f"{prefix.name}.bin")


def idx_path(prefix: Path) -> Path:
    """Where the index of a corpus lies."""
    return prefix.with_name(f"{prefix.name}.idx")


def read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """(token dtype, sequences, documents + 1) of an .idx whose size is what its header says.

    Raises CorruptFileError.
    """
    found = path.stat().st_size
    with open(path, "rb") as f:
        head = f.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise CorruptFileError(f"{path} is not an indexed corpus: it does not begin with MMIDIDX; {REBUILD}")
    if len(head) < HEADER.size:
        raise CorruptFileError(
            f"{path} is truncated: expected {HEADER.size} bytes of header, found {found}; {REBUILD}"
        )
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise CorruptFileError(f"{path} has version {version}, not {VERSION}: {REBUILD}")
    if code not in DTYPES or DTYPES[code].kind == "f":
        name = DTYPES[code].name if code in DTYPES else "unknown"
        raise CorruptFileError(f"{path} has dtype code {code} ({name}), which holds no tokens: {REBUILD}")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if expected != found or boundaries < 1:
        state = "truncated" if found < expected else "not of the size its header says"
        raise CorruptFileError(f"{path} is {state}: expected {expected} bytes, found {found}; {REBUILD}")
    return DTYPES[code], sequences, boundaries


class Index:
    """An .idx, memory-mapped. Its size is checked here, its content by `problem`.

    Attributes:
        dtype             of a token
        lengths           i32 [num_sequences]       tokens per sequence
        pointers          i64 [num_sequences]       byte offset of each sequence in the .bin
        document_indices  i64 [num_documents + 1]   first sequence of each document, then num_sequences

    Raises CorruptFileError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dtype, sequences, boundaries = read_header(path)
        content = np.memmap(path, mode="r", dtype=np.uint8)[HEADER.size :].view(np.ndarray)
        pointers_at, documents_at = 4 * sequences, 12 * sequences
        self.lengths: NDArray[np.int32] = content[:pointers_at].view("<i4")
        self.pointers: NDArray[np.int64] = content[pointers_at:documents_at].view("<i8")
        self.document_indices: NDArray[np.int64] = content[documents_at:].view("<i8")
        self.num_sequences, self.num_documents = sequences, boundaries - 1
        chunks = (self.lengths[start : start + CHUNK] for start in range(0, sequences, CHUNK))
        self.num_tokens = sum(int(chunk.sum(dtype=np.int64)) for chunk in chunks)

    def problem(self) -> str | None:
        """What is wrong with the content, None when nothing is.

        Pointers must follow from lengths, document boundaries must rise from 0 to num_sequences.
        """
        expected = 0
        for start in range(0, self.num_sequences, CHUNK):
            sizes = self.lengths[start : start + CHUNK].astype(np.int64) * self.dtype.itemsize
            ends = expected + np.cumsum(sizes)
            wrong = (sizes < 0) | (self.pointers[start : start + CHUNK] != ends - sizes)
            if wrong.any():
                return f"pointers do not follow from lengths at sequence {start + int(wrong.argmax())}"
            expected = int(ends[-1])
        rises = f"document boundaries do not rise from 0 to {self.num_sequences}"
        for start in range(0, self.num_documents, CHUNK):
            falls = np.diff(self.document_indices[start : start + CHUNK + 1]) < 0
            if falls.any():
                return f"{rises}: that of document {start + int(falls.argmax()) + 1} falls"
        if self.document_indices[0] != 0 or self.document_indices[-1] != self.num_sequences:
            return f"{rises}: they go from {self.document_indices[0]} to {self.document_indices[-1]}"
        return None

    def document_starts(self, begin: int, end: int) -> NDArray[np.int64]:
        """First token of documents `begin` to `end`, the latter included: i64 [end - begin + 1].

        The one after the last starts at num_tokens. The content has no fault.
        """
        sequences = self.document_indices[begin : end + 1]
        starts = np.full(len(sequences), self.num_tokens, dtype=np.int64)
        inside = sequences < self.num_sequences  # not so the documents at the end that have no sequence
        starts[inside] = self.pointers[sequences[inside]] // self.dtype.itemsize
        return starts

    def document_of(self, token: int) -> int:
        """The document that holds a token. The content has no fault."""
        sequence = int(np.searchsorted(self.pointers, token * self.dtype.itemsize, side="right")) - 1
        return int(np.searchsorted(self.document_indices, sequence, side="right")) - 1
