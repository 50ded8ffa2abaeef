"""Reading and writing Megatron's indexed corpora; indexed_format.py has the layout."""

import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mlm.data.indexed_format import (
    DTYPES,
    HEADER,
    LENGTH,
    LONGEST,
    MAGIC,
    POSITION,
    REBUILD,
    VERSION,
    Index,
    bin_path,
    idx_path,
    token_dtype,
)
from mlm.errors import CorruptFileError, UserError
from mlm.files.atomic import copy_bytes, digest_file, fsync_directory, sync

__all__ = [
    "DTYPES",
    "HEADER",
    "MAGIC",
    "REBUILD",
    "IndexedDataset",
    "IndexedWriter",
    "bin_path",
    "idx_path",
    "token_dtype",
]

CHUNK = 1 << 22  # elements looked at at a time: constant memory
BUFFER = 1 << 18  # bytes a writer holds back: fewer calls of the kernel than documents


class IndexedDataset:
    """A memory-mapped corpus. Opening it checks all that is cheap to check; reading copies nothing.

    Attributes:
        lengths           i32 [num_sequences]       tokens per sequence
        pointers          i64 [num_sequences]       byte offset of each sequence in the .bin
        document_indices  i64 [num_documents + 1]   first sequence of each document, then num_sequences
        tokens            [num_tokens]              the whole .bin

    An empty corpus is a mistake unless `allow_empty` says that it may be: shards of a build may.

    Raises UserError when a file is missing or the corpus is empty, CorruptFileError when the two files are
    not what they say.
    """

    def __init__(self, prefix: str | Path, *, allow_empty: bool = False) -> None:
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = bin_path(self.prefix), idx_path(self.prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise UserError(
                    f"no file {path}: a corpus is a pair .idx and .bin; set data.path to a folder written by "
                    f"`mlm data build`, or data.train to the prefix without .bin"
                )
        self.index = index = Index(self.idx_path)
        self.dtype, self.num_tokens = index.dtype, index.num_tokens
        self.lengths, self.pointers, self.document_indices = (
            index.lengths,
            index.pointers,
            index.document_indices,
        )
        self.num_sequences, self.num_documents = index.num_sequences, index.num_documents
        if self.num_sequences == 0 and not allow_empty:
            raise UserError(f"{self.idx_path} holds no documents: the corpus is empty; {REBUILD}")
        if (fault := index.problem()) is not None:
            raise CorruptFileError(f"{self.idx_path}: {fault}: the index is damaged; {REBUILD}")
        if self.num_tokens == 0 and not allow_empty:
            raise UserError(f"{self.idx_path} holds no tokens: the corpus is empty; {REBUILD}")
        self._check_bin()
        self.tokens: NDArray[Any] = (
            np.memmap(self.bin_path, mode="r", dtype=self.dtype).view(np.ndarray)
            if self.num_tokens
            else np.empty(0, self.dtype)  # an empty file cannot be mapped
        )

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, i: int) -> NDArray[Any]:
        """Tokens of sequence `i`, a view into the map. Raises IndexError."""
        start = int(self.pointers[i]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[i])]

    def document(self, i: int) -> NDArray[Any]:
        """Tokens of all sequences of document `i`, a view into the map. Raises IndexError."""
        if not 0 <= i < self.num_documents:
            raise IndexError(i)
        start, end = self.index.document_starts(i, i + 1)
        return self.tokens[start:end]

    @cached_property
    def digest(self) -> str:
        """Digest of the index: the sample order is a function of the lengths it holds."""
        return digest_file(self.idx_path)

    @cached_property
    def document_starts(self) -> NDArray[np.int64]:
        """First token of each document, then num_tokens: i64 [num_documents + 1]."""
        return self.index.document_starts(0, self.num_documents)

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

    def _check_bin(self) -> None:
        expected, found = self.num_tokens * self.dtype.itemsize, self.bin_path.stat().st_size
        if expected != found:
            state = "truncated" if found < expected else "longer than its index says"
            raise CorruptFileError(
                f"{self.bin_path} is {state}: expected {expected} bytes ({self.num_tokens} tokens of "
                f"{self.dtype}), found {found}; {REBUILD}"
            )


class IndexedWriter:
    """Writes a corpus document by document; both files appear when the `with` block ends well, or neither.

    Memory stays constant: what becomes the index lies in files beside the corpus until then. Raises OSError.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        assert dtype in DTYPES.values(), f"{dtype} has no code"
        assert dtype.kind != "f", f"{dtype} holds no tokens"
        self.prefix, self.dtype = Path(prefix), dtype
        self.num_documents = self.num_sequences = self.num_tokens = self._under_way = 0
        self._limits = np.iinfo(dtype)
        self._open = ExitStack()

    def __enter__(self) -> "IndexedWriter":
        with ExitStack() as opening:
            opening.callback(self._remove_partials)
            self._bin, self._lengths, self._documents = (
                opening.enter_context(open(self._partial(suffix), "w+b", buffering=BUFFER))
                for suffix in (".bin", ".lengths", ".documents")
            )
            self._documents.write(POSITION.pack(0))
            self._open = opening.pop_all()
        return self

    def add_document(
        self, tokens: Sequence[int] | NDArray[Any], lengths: Sequence[int] | NDArray[Any] | None = None
    ) -> None:
        """Append one document: one sequence, or as many as `lengths` (tokens of each) divide it into.

        Raises ValueError when a token id does not fit the dtype.
        """
        self.extend(tokens)
        self.end_document(lengths)

    def extend(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append tokens to the document under way.

        Raises ValueError when a token id does not fit the dtype.
        """
        content = np.asarray(self._content(tokens))
        self._bin.write(content.data)
        self._under_way += len(content)
        if self._under_way > LONGEST:
            raise ValueError(f"a document of {self._under_way} tokens: {LONGEST} is the limit of the format")

    def end_document(self, lengths: Sequence[int] | NDArray[Any] | None = None) -> None:
        """End the document under way: one sequence, or as many as `lengths` divide it into."""
        count = self._under_way
        if lengths is None:
            self._lengths.write(LENGTH.pack(count))
            self.num_sequences += 1
        else:
            each = np.asarray(lengths, dtype=np.int64)
            assert each.sum() == count, f"lengths sum to {each.sum()}, not to {count}"
            assert not (each < 0).any(), "a sequence cannot have less than no tokens"
            self._lengths.write(each.astype("<i4").tobytes())
            self.num_sequences += len(each)
        self._documents.write(POSITION.pack(self.num_sequences))
        self.num_documents += 1
        self.num_tokens += count
        self._under_way = 0

    def append(self, other: IndexedDataset) -> None:
        """Append all documents of another corpus of the same dtype, which may be empty.

        The kernel copies the tokens, where it can without moving them. Raises CorruptFileError.
        """
        assert other.dtype == self.dtype, f"{other.dtype} tokens do not go into a file of {self.dtype}"
        copy_bytes(other.bin_path, self._bin, other.num_tokens * self.dtype.itemsize)
        for start in range(0, other.num_sequences, CHUNK):
            self._lengths.write(other.lengths[start : start + CHUNK].tobytes())
        for start in range(1, other.num_documents + 1, CHUNK):
            boundaries = other.document_indices[start : start + CHUNK] + self.num_sequences
            self._documents.write(boundaries.astype("<i8").tobytes())
        self.num_documents += other.num_documents
        self.num_sequences += other.num_sequences
        self.num_tokens += other.num_tokens

    def _content(self, tokens: Sequence[int] | NDArray[Any]) -> "NDArray[Any] | array[int]":
        """The tokens in the dtype of the file."""
        if isinstance(tokens, (bytes, bytearray, memoryview)):
            tokens = np.frombuffer(tokens, dtype=np.uint8)
        elif isinstance(tokens, array):
            tokens = np.frombuffer(tokens, dtype=tokens.typecode)
        if not isinstance(tokens, np.ndarray):
            try:
                return array(self.dtype.char, tokens)  # checks as it goes, in less time than np.asarray takes
            except OverflowError:
                tokens = np.asarray(tokens)
        if tokens.dtype != self.dtype and len(tokens):
            lowest, highest = tokens.min(), tokens.max()
            if lowest < self._limits.min or highest > self._limits.max:
                raise ValueError(f"token ids {lowest} to {highest} do not fit {self.dtype.name}")
        return np.ascontiguousarray(tokens, dtype=self.dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            if kind is None:
                self._publish()

    def _publish(self) -> None:
        with open(self._partial(".idx"), "wb") as f:
            self._write_index(f)
            sync(f)
        sync(self._bin)
        # An .idx vouches for its .bin: the old one goes first and the new one comes last.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._partial(".bin"), bin_path(self.prefix))
        os.replace(self._partial(".idx"), idx_path(self.prefix))
        fsync_directory(self.prefix.parent)

    def _write_index(self, f: BinaryIO) -> None:
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        f.write(HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1))
        self._lengths.flush()
        self._documents.flush()
        copy_bytes(self._partial(".lengths"), f, LENGTH.size * self.num_sequences)
        position = 0
        self._lengths.seek(0)
        while block := self._lengths.read(LENGTH.size * CHUNK):
            sizes = np.frombuffer(block, dtype="<i4").astype(np.int64) * self.dtype.itemsize
            ends = position + np.cumsum(sizes)
            f.write((ends - sizes).astype("<i8").tobytes())
            position = int(ends[-1])
        copy_bytes(self._partial(".documents"), f, POSITION.size * (self.num_documents + 1))

    def _partial(self, suffix: str) -> Path:
        return self.prefix.with_name(f".{self.prefix.name}{suffix}.{os.getpid()}.partial")

    def _remove_partials(self) -> None:
        for suffix in (".bin", ".lengths", ".documents", ".idx"):
            self._partial(suffix).unlink(missing_ok=True)
