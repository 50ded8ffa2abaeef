r"""Megatron's indexed corpora: `PREFIX.bin` holds the tokens, `PREFIX.idx` the position of each sequence.

Byte-compatible with Megatron-LM both ways. Everything is little-endian.

    .idx   9 bytes "MMIDIDX\0\0" · u64 version = 1 · u8 dtype code · u64 sequences n · u64 documents + 1
           then i32 lengths [n] (tokens), i64 pointers [n] (byte offsets in .bin),
           i64 document indices [documents + 1] (first sequence of each document, then n)
    .bin   the tokens of all sequences, one after another

A GPT corpus holds one sequence per document, a BERT corpus one per sentence.
"""

import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.data.stored_corpus import StoredTokens, stored_pointer, stored_tokens
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import copy_bytes, digest_file, fsync_directory, partial_path, sampled_digest, sync

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)
}
CHUNK = 1 << 20  # entries processed at a time: constant memory
LONGEST = (1 << 31) - 1  # tokens of a sequence: lengths are i32
POSITION = struct.Struct("<q")  # an entry of pointers and document indices
REBUILD = "write it again with `mlm data build`"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of a token on disk: u16 for a vocabulary below 65,500, else i32 (Megatron's rule)."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.idx")


def read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Read (token dtype, sequences, documents + 1) of an .idx and compare its size with them.

    Raises CorruptFileError.
    """
    size = path.stat().st_size
    with open(path, "rb") as f:
        head = f.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise CorruptFileError(f"{path} is not an indexed corpus: it does not begin with MMIDIDX; {REBUILD}")
    if len(head) < HEADER.size:
        raise CorruptFileError(
            f"{path} is truncated: expected {HEADER.size} bytes of header, found {size}; {REBUILD}"
        )
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise CorruptFileError(f"{path} has version {version}, not {VERSION}: {REBUILD}")
    if code not in DTYPES or DTYPES[code].kind == "f":
        name = DTYPES[code].name if code in DTYPES else "unknown"
        raise CorruptFileError(f"{path} has dtype code {code} ({name}), which is not for tokens: {REBUILD}")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if expected != size or boundaries < 1:
        state = "truncated" if size < expected else "not of the size its header says"
        raise CorruptFileError(f"{path} is {state}: expected {expected} bytes, found {size}; {REBUILD}")
    return DTYPES[code], sequences, boundaries


class IndexedDataset:
    """A memory-mapped corpus, or one in a store. Opening runs all cheap checks; reading does not copy.

    Attributes:
        lengths           i32 [num_sequences]       tokens per sequence
        pointers          i64 [num_sequences]       byte offset of each sequence in the .bin
        document_indices  i64 [num_documents + 1]   first sequence of each document, then num_sequences
        tokens            [num_tokens]              the full .bin, or StoredTokens

    An empty corpus is an error unless `allow_empty`: shards of a build may be empty.

    Raises UserError if a file is missing or the corpus is empty, CorruptFileError if the files are damaged.
    """

    def __init__(self, prefix: str | Path, *, allow_empty: bool = False) -> None:
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = bin_path(self.prefix), idx_path(self.prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file() and not stored_pointer(path).is_file():
                raise UserError(
                    f"no file {path}: a corpus is a pair .idx and .bin; set data.path to a folder written by "
                    f"`mlm data build`, or data.train to the prefix without .bin"
                )
        self.dtype, self.num_sequences, boundaries = read_header(self.idx_path)
        self.stored = stored_tokens(self.bin_path, self.dtype)
        self.num_documents = boundaries - 1
        if self.num_sequences == 0 and not allow_empty:
            raise UserError(f"{self.idx_path} holds no documents: the corpus is empty; {REBUILD}")
        content = np.memmap(self.idx_path, mode="r", dtype=np.uint8)[HEADER.size :].view(np.ndarray)
        pointers_at, documents_at = 4 * self.num_sequences, 12 * self.num_sequences
        self.lengths: NDArray[np.int32] = content[:pointers_at].view("<i4")
        self.pointers: NDArray[np.int64] = content[pointers_at:documents_at].view("<i8")
        self.document_indices: NDArray[np.int64] = content[documents_at:].view("<i8")
        self.num_tokens = self._check_index()
        if self.num_tokens == 0 and not allow_empty:
            raise UserError(f"{self.idx_path} holds no tokens: the corpus is empty; {REBUILD}")
        expected, size = self.num_tokens * self.dtype.itemsize, self.bin_bytes
        if expected != size:
            state = "truncated" if size < expected else "longer than its index says"
            raise CorruptFileError(
                f"{self.bin_path} is {state}: expected {expected} bytes ({self.num_tokens} tokens of "
                f"{self.dtype}), found {size}; {REBUILD}"
            )
        self.tokens: NDArray[Any] | StoredTokens = self.stored or np.empty(0, self.dtype)
        if not self.stored and self.num_tokens:  # an empty file cannot be mapped
            self.tokens = np.memmap(self.bin_path, mode="r", dtype=self.dtype).view(np.ndarray)

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, i: int) -> NDArray[Any]:
        """Return the tokens of sequence `i`, a view into the map. Raises IndexError."""
        start = int(self.pointers[i]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[i])]

    def document(self, i: int) -> NDArray[Any]:
        """Return the tokens of all sequences of document `i`, a view into the map. Raises IndexError."""
        if not 0 <= i < self.num_documents:
            raise IndexError(i)
        return self.tokens[self.first_token(i) : self.first_token(i + 1)]

    @cached_property
    def digest(self) -> str:
        """Digest of the index, whose lengths determine the sample order."""
        return digest_file(self.idx_path)

    @cached_property
    def bin_bytes(self) -> int:
        return self.bin_path.stat().st_size if self.stored is None else self.stored.source.bytes

    def tokens_digest(self) -> str:
        """Return the digest of the full .bin. Raises OSError, UserError."""
        return digest_file(self.bin_path) if self.stored is None else self.stored.digest()

    def sampled_digest(self) -> str:
        """Return a digest of samples of the tokens (`files.sampled_digest`). Raises OSError, UserError."""
        return sampled_digest(self.bin_path) if self.stored is None else self.stored.sampled_digest()

    @cached_property
    def document_starts(self) -> NDArray[np.int64]:
        """First token of each document, then num_tokens: i64 [num_documents + 1]."""
        starts = np.full(self.num_documents + 1, self.num_tokens, dtype=np.int64)
        inside = self.document_indices < self.num_sequences  # empty documents at the end have no sequence
        starts[inside] = self.pointers[self.document_indices[inside]] // self.dtype.itemsize
        return starts

    def first_token(self, document: int) -> int:
        """Return the number of a document's first token; num_tokens for the one after the last."""
        sequence = int(self.document_indices[document])
        if sequence == len(self):
            return self.num_tokens
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def document_of(self, token: int) -> int:
        sequence = int(np.searchsorted(self.pointers, token * self.dtype.itemsize, side="right")) - 1
        return int(np.searchsorted(self.document_indices, sequence, side="right")) - 1

    def max_token(self) -> int:
        """Return the largest token id; reads the full .bin. Raises CorruptFileError for a negative id."""
        largest = 0
        for start in range(0, self.num_tokens, CHUNK):
            chunk = self.tokens[start : start + CHUNK]
            if (lowest := int(chunk.min())) < 0:
                raise CorruptFileError(f"{self.bin_path} holds the token id {lowest}: {REBUILD}")
            largest = max(largest, int(chunk.max()))
        return largest

    def _check_index(self) -> int:
        """Return the number of tokens. Raises CorruptFileError if the index is damaged.

        Pointers must match the lengths, and document boundaries ascend from 0 to num_sequences.
        """
        problem, expected = None, 0
        for start in range(0, self.num_sequences, CHUNK):
            sizes = self.lengths[start : start + CHUNK].astype(np.int64) * self.dtype.itemsize
            ends = expected + np.cumsum(sizes)
            wrong = (sizes < 0) | (self.pointers[start : start + CHUNK] != ends - sizes)
            if wrong.any():
                problem = f"pointers do not follow from lengths at sequence {start + int(wrong.argmax())}"
                break
            expected = int(ends[-1])
        bounds = self.document_indices
        falls = any((np.diff(bounds[n : n + CHUNK + 1]) < 0).any() for n in range(0, len(bounds), CHUNK))
        if problem is None and (falls or bounds[0] != 0 or bounds[-1] != self.num_sequences):
            problem = f"document boundaries do not rise from 0 to {self.num_sequences}"
        if problem is not None:
            raise CorruptFileError(f"{self.idx_path}: {problem}: the index is damaged; {REBUILD}")
        return expected // self.dtype.itemsize


class IndexedWriter:
    """Writer of a corpus, document by document; both files appear if the `with` block succeeds, else none.

    Memory is constant: until then the index is in temporary files. Raises OSError.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        assert dtype in DTYPES.values(), f"{dtype} has no code"
        assert dtype.kind != "f", f"{dtype} is not for tokens"
        self.prefix, self.dtype = Path(prefix), dtype
        self.num_documents = self.num_sequences = self.num_tokens = 0
        self._open = ExitStack()
        self._partial = {".bin": partial_path(bin_path(self.prefix))}
        self._partial |= {
            name: partial_path(idx_path(self.prefix)) for name in (".lengths", ".documents", ".idx")
        }

    def __enter__(self) -> "IndexedWriter":
        with ExitStack() as opening:
            for path in self._partial.values():
                opening.callback(path.unlink, missing_ok=True)
            # a large buffer: fewer system calls than documents
            self._bin, self._lengths, self._documents = (
                opening.enter_context(open(self._partial[suffix], "w+b", buffering=1 << 18))
                for suffix in (".bin", ".lengths", ".documents")
            )
            self._documents.write(POSITION.pack(0))
            self._open = opening.pop_all()
        return self

    def add_document(
        self, tokens: Sequence[int] | NDArray[Any], lengths: Sequence[int] | NDArray[Any] | None = None
    ) -> None:
        """Append one document: one sequence, or several of `lengths` tokens.

        Raises ValueError if a token id does not fit the dtype.
        """
        tokens = np.asarray(tokens)
        if tokens.dtype != self.dtype and len(tokens):
            lowest, highest, limits = tokens.min(), tokens.max(), np.iinfo(self.dtype)
            if lowest < limits.min or highest > limits.max:
                raise ValueError(f"token ids {lowest} to {highest} do not fit {self.dtype.name}")
        content = np.ascontiguousarray(tokens, dtype=self.dtype)
        if (count := len(content)) > LONGEST:
            raise ValueError(f"a document of {count} tokens: {LONGEST} is the limit of the format")
        self._bin.write(content.data)
        sizes = np.asarray([count] if lengths is None else lengths, dtype=np.int64)
        assert sizes.sum() == count, f"lengths sum to {sizes.sum()}, not to {count}"
        assert not (sizes < 0).any(), "a length is negative"
        self._lengths.write(sizes.astype("<i4").tobytes())
        self.num_sequences += len(sizes)
        self._documents.write(POSITION.pack(self.num_sequences))
        self.num_documents += 1
        self.num_tokens += count

    def append(self, corpus: IndexedDataset, begin: int = 0, end: int | None = None) -> None:
        """Append documents begin … end - 1 of another corpus of the same dtype, by default all.

        The kernel copies the tokens, by reference where it can. Raises CorruptFileError.
        """
        assert corpus.dtype == self.dtype, f"{corpus.dtype} tokens do not go into a file of {self.dtype}"
        end, size = corpus.num_documents if end is None else end, self.dtype.itemsize
        first, last = corpus.document_indices[[begin, end]].tolist()
        token, num_tokens = corpus.first_token(begin), corpus.first_token(end) - corpus.first_token(begin)
        copy_bytes(corpus.bin_path, self._bin, num_tokens * size, begin=token * size)
        for start in range(first, last, CHUNK):
            self._lengths.write(corpus.lengths[start : min(start + CHUNK, last)].tobytes())
        for start in range(begin + 1, end + 1, CHUNK):
            boundaries = corpus.document_indices[start : min(start + CHUNK, end + 1)]
            self._documents.write((boundaries + (self.num_sequences - first)).astype("<i8").tobytes())
        self.num_documents += end - begin
        self.num_sequences += last - first
        self.num_tokens += num_tokens

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._open:
            if kind is not None:
                return
            self._lengths.flush()
            self._documents.flush()
            self._lengths.seek(0)
            code, position = next(code for code, dtype in DTYPES.items() if dtype == self.dtype), 0
            with open(self._partial[".idx"], "wb") as f:
                f.write(HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1))
                copy_bytes(self._partial[".lengths"], f, 4 * self.num_sequences)
                while block := self._lengths.read(4 * CHUNK):
                    sizes = np.frombuffer(block, dtype="<i4").astype(np.int64) * self.dtype.itemsize
                    ends = position + np.cumsum(sizes)
                    f.write((ends - sizes).astype("<i8").tobytes())
                    position = int(ends[-1])
                copy_bytes(self._partial[".documents"], f, POSITION.size * (self.num_documents + 1))
                sync(f)
            sync(self._bin)
            # An .idx declares its .bin complete: the old one is removed first and the new one written last.
            idx_path(self.prefix).unlink(missing_ok=True)
            os.replace(self._partial[".bin"], bin_path(self.prefix))
            os.replace(self._partial[".idx"], idx_path(self.prefix))
            fsync_directory(self.prefix.parent)
