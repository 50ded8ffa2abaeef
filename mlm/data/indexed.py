"""Megatron's indexed corpus: `PREFIX.bin` holds the tokens, `PREFIX.idx` says where each sequence lies.

Byte-compatible with Megatron-LM both ways. Everything is little-endian.

    .idx   9 bytes "MMIDIDX\\0\\0" · u64 version = 1 · u8 dtype code · u64 sequences n · u64 documents + 1
           then i32 lengths [n] (tokens), i64 pointers [n] (byte offsets in .bin),
           i64 document indices [documents + 1] (first sequence of each document, then n)
    .bin   the tokens of all sequences, one after another
"""

import os
import struct
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mlm.config.errors import CorruptFileError, UserError
from mlm.files import digest_file, fsync_directory

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)
}
CHUNK = 1 << 22  # elements looked at at a time: constant memory
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


class IndexedDataset:
    """A memory-mapped corpus. Opening it checks all that is cheap to check; reading copies nothing.

    Attributes:
        lengths           i32 [num_sequences]       tokens per sequence
        pointers          i64 [num_sequences]       byte offset of each sequence in the .bin
        document_indices  i64 [num_documents + 1]   first sequence of each document, then num_sequences
        tokens            [num_tokens]              the whole .bin

    Raises UserError when a file is missing or the corpus is empty, CorruptFileError when the two files are
    not what they say.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = bin_path(self.prefix), idx_path(self.prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise UserError(
                    f"no file {path}: a corpus is a pair .idx and .bin; set data.path to a folder written by "
                    f"`mlm data build`, or data.train to the prefix without .bin"
                )
        self.dtype, sequences, boundaries = read_header(self.idx_path)
        index = np.memmap(self.idx_path, mode="r", dtype=np.uint8)[HEADER.size :].view(np.ndarray)
        pointers_at, documents_at = 4 * sequences, 12 * sequences
        self.lengths: NDArray[np.int32] = index[:pointers_at].view("<i4")
        self.pointers: NDArray[np.int64] = index[pointers_at:documents_at].view("<i8")
        self.document_indices: NDArray[np.int64] = index[documents_at:].view("<i8")
        self.num_sequences, self.num_documents = sequences, boundaries - 1
        self._check_index()
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        if self.num_tokens == 0:
            raise UserError(f"{self.idx_path} holds no tokens: the corpus is empty; {REBUILD}")
        self._check_bin()
        self.tokens: NDArray[Any] = np.memmap(self.bin_path, mode="r", dtype=self.dtype).view(np.ndarray)

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, i: int) -> NDArray[Any]:
        """Tokens of sequence `i`, a view into the map. Raises IndexError."""
        start = int(self.pointers[i]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[i])]

    @cached_property
    def digest(self) -> str:
        """Digest of the index: the sample order is a function of the lengths it holds."""
        return digest_file(self.idx_path)

    @cached_property
    def document_starts(self) -> NDArray[np.int64]:
        """First token of each document, then num_tokens: i64 [num_documents + 1]."""
        sequence_starts = np.append(self.pointers // self.dtype.itemsize, self.num_tokens)
        return sequence_starts[self.document_indices]

    def max_token(self) -> int:
        """Largest token id. Reads the whole .bin in constant memory.

        Raises CorruptFileError on a negative id.
        """
        largest = 0
        for start in range(0, self.num_tokens, CHUNK):
            chunk = self.tokens[start : start + CHUNK]
            if (lowest := int(chunk.min())) < 0:
                raise CorruptFileError(f"{self.bin_path} holds the token id {lowest}: {REBUILD}")
            largest = max(largest, int(chunk.max()))
        return largest

    def _check_index(self) -> None:
        """Pointers must follow from lengths, document boundaries must rise from 0 to num_sequences."""
        expected = 0
        for start in range(0, self.num_sequences, CHUNK):
            lengths = self.lengths[start : start + CHUNK].astype(np.int64)
            ends = expected + np.cumsum(lengths) * self.dtype.itemsize
            pointers = ends - lengths * self.dtype.itemsize
            if lengths.min() < 0 or not np.array_equal(pointers, self.pointers[start : start + CHUNK]):
                raise CorruptFileError(
                    f"{self.idx_path}: pointers do not follow from lengths near sequence {start}: the index "
                    f"is damaged; {REBUILD}"
                )
            expected = int(ends[-1])
        documents = self.document_indices
        if documents[0] != 0 or documents[-1] != self.num_sequences or (np.diff(documents) < 0).any():
            raise CorruptFileError(
                f"{self.idx_path}: document boundaries do not rise from 0 to {self.num_sequences}: the index "
                f"is damaged; {REBUILD}"
            )

    def _check_bin(self) -> None:
        expected, found = self.num_tokens * self.dtype.itemsize, self.bin_path.stat().st_size
        if expected != found:
            state = "truncated" if found < expected else "longer than its index says"
            raise CorruptFileError(
                f"{self.bin_path} is {state}: expected {expected} bytes ({self.num_tokens} tokens of "
                f"{self.dtype}), found {found}; {REBUILD}"
            )


def read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """(token dtype, sequences, documents + 1) of an .idx whose size is what its header says.

    Raises CorruptFileError, or UserError for an index of no sequences.
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
    if sequences == 0:
        raise UserError(f"{path} holds no documents: the corpus is empty; {REBUILD}")
    return DTYPES[code], sequences, boundaries


class IndexedWriter:
    """Writes a corpus document by document; both files appear when the `with` block ends well, or neither.

    Each document is one sequence, as Megatron's GPT preprocessing writes it. Raises OSError.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        assert dtype in DTYPES.values(), f"{dtype} has no code"
        assert dtype.kind != "f", f"{dtype} holds no tokens"
        self.prefix, self.dtype = Path(prefix), dtype
        self.num_tokens = 0
        self._lengths = array("i")
        self._limits = np.iinfo(dtype)

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def __enter__(self) -> "IndexedWriter":
        self._bin = open(self._partial(".bin"), "wb")  # closed in __exit__
        return self

    def add_document(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append one document. Raises ValueError when a token id does not fit the dtype."""
        ids = np.asarray(tokens, dtype=None if len(tokens) else self.dtype)
        if len(ids) and (ids.min() < self._limits.min or ids.max() > self._limits.max):
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit {self.dtype.name}")
        self._bin.write(ids.astype(self.dtype).tobytes())
        self._lengths.append(len(ids))
        self.num_tokens += len(ids)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
            else:
                self._bin.close()
        finally:
            for suffix in (".bin", ".idx"):
                self._partial(suffix).unlink(missing_ok=True)

    def _publish(self) -> None:
        sync(self._bin)
        with open(self._partial(".idx"), "wb") as f:
            self._write_index(f)
            sync(f)
        # An .idx vouches for its .bin: the old one goes first and the new one comes last.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._partial(".bin"), bin_path(self.prefix))
        os.replace(self._partial(".idx"), idx_path(self.prefix))
        fsync_directory(self.prefix.parent)

    def _write_index(self, f: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        f.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
        f.write(lengths.astype("<i4").tobytes())
        f.write(pointers.astype("<i8").tobytes())
        f.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())

    def _partial(self, suffix: str) -> Path:
        return self.prefix.with_name(f".{self.prefix.name}{suffix}.{os.getpid()}.partial")


def sync(f: BinaryIO) -> None:
    """Push a file's content to the disk, then close it."""
    with f:
        f.flush()
        os.fsync(f.fileno())
