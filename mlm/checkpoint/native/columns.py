"""The chunks of a checkpoint's tensors in columns of numbers: stored, checked and searched by numpy.

A checkpoint of many ranks has a million chunks. As Python objects they cost a minute per save; here each
check is a few passes over the arrays of a tensor, and `Chunk` objects are made only for requested chunks.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mlm.checkpoint.native.slices import Region, describe

Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Shape: TypeAlias = tuple[int, ...]

MOST_CORNERS = 1 << 25
"""Corners of a tensor's chunks that are compared, in 1 GiB: 2^d of a chunk that is split along d dims."""


@dataclass(frozen=True)
class Chunk:
    """A stored piece of a tensor: the entry of the tensor's name in `file`."""

    file: str
    region: Region


class Chunks(Collection[Chunk]):
    """The chunks of one tensor, kept in columns: file [n], offset and size [n, dims].

    `file` numbers the names in `names`.
    """

    def __init__(self, names: Sequence[str], file: Ints, offset: Ints, size: Ints) -> None:
        self.names, self.file, self.offset, self.size = names, file, offset, size

    @classmethod
    def of(cls, chunks: Collection[Chunk], dims: int) -> "Chunks":
        """Return the columns of chunks of a tensor of `dims` dims."""
        if isinstance(chunks, Chunks):
            return chunks
        shape = len(chunks), dims
        offset = np.array([chunk.region.offset for chunk in chunks], np.int64).reshape(shape)
        size = np.array([chunk.region.size for chunk in chunks], np.int64).reshape(shape)
        return cls([chunk.file for chunk in chunks], np.arange(len(chunks), dtype=np.int32), offset, size)

    def __len__(self) -> int:
        return len(self.file)

    def __contains__(self, chunk: object) -> bool:
        return chunk in tuple(self)

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks(np.arange(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Collection) and tuple(self) == tuple(other)

    def overlapping(self, region: Region) -> Iterator[Chunk]:
        """Yield the chunks that hold an element of `region`."""
        low, count = (np.array(numbers, np.int64) for numbers in region)
        overlaps = ((self.offset < low + count) & (self.offset + self.size > low)).all(1)
        return self._chunks(np.flatnonzero(overlaps))

    def _chunks(self, rows: Ints) -> Iterator[Chunk]:
        columns = (self.file[rows].tolist(), self.offset[rows].tolist(), self.size[rows].tolist())
        for file, offset, size in zip(*columns, strict=True):
            yield Chunk(self.names[file], Region(tuple(offset), tuple(size)))


@dataclass(frozen=True)
class Columns:
    """The chunks of many tensors, sorted by tensor: tensor and file [n], offset and size [n, dims].

    `dims` is the largest number of dims of any tensor, at least 1; the further columns of other tensors hold
    offset 0 and size 1. `shapes` are the tensors'.
    """

    shapes: Sequence[tuple[int, ...]]
    tensor: Ints
    file: Ints
    offset: Ints
    size: Ints

    def by_tensor(self, names: Sequence[str]) -> list[Chunks]:
        edges = np.searchsorted(self.tensor, np.arange(len(self.shapes) + 1)).tolist()
        return [
            Chunks(names, self.file[a:b], self.offset[a:b, : len(shape)], self.size[a:b, : len(shape)])
            for shape, (a, b) in zip(self.shapes, pairwise(edges), strict=True)
        ]


def dims_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the columns of an offset: the largest number of dims, at least 1."""
    return max(1, *map(len, shapes)) if shapes else 1


def padded(numbers: Ints, dims: int, fill: int) -> npt.NDArray[np.int64]:
    """Return `numbers` [n, d], widened by columns of `fill` to [n, dims]."""
    wide = np.full((len(numbers), dims), fill, np.int64)
    wide[:, : numbers.shape[1]] = numbers
    return wide


def columns_of(
    shapes: Sequence[tuple[int, ...]], chunks: Sequence[Collection[Chunk]], files: Sequence[str]
) -> Columns:
    """Return the chunks of each tensor in columns; `files` gives the order of files."""
    dims, file_number = dims_of(shapes), {name: number for number, name in enumerate(files)}
    empty = np.zeros((0, dims), np.int64)
    file_numbers, offsets, sizes = [np.zeros(0, np.int32)], [empty], [empty]
    for shape, tensor_chunks in zip(shapes, chunks, strict=True):
        rows = Chunks.of(tensor_chunks, len(shape))
        file_numbers.append(np.array([file_number.get(name, -1) for name in rows.names], np.int32)[rows.file])
        offsets.append(padded(rows.offset, dims, 0))
        sizes.append(padded(rows.size, dims, 1))
    tensor = np.repeat(
        np.arange(len(chunks), dtype=np.int32), [len(tensor_chunks) for tensor_chunks in chunks]
    )
    file = np.concatenate(file_numbers)
    order = np.lexsort((file, tensor))
    offset, size = (np.concatenate(parts)[order] for parts in (offsets, sizes))
    return Columns(shapes, tensor, file[order], offset, size)


def encode_columns(columns: Columns) -> bytes:
    """Return the columns as bytes, one after the other: tensor and file int32, offset and size int64."""
    numbers = ((columns.tensor, "<i4"), (columns.file, "<i4"), (columns.offset, "<i8"), (columns.size, "<i8"))
    return b"".join(column.astype(kind, copy=False).tobytes() for column, kind in numbers)


def decode_columns(content: bytes, shapes: Sequence[tuple[int, ...]], files: int) -> Columns:
    """The inverse of `encode_columns`, for chunks in `files` files.

    Raises ValueError unless the chunks name tensors and files that exist, in ascending order, each once.
    """
    dims = dims_of(shapes)
    count, remainder = divmod(len(content), 8 + 16 * dims)
    if remainder:
        raise ValueError(f"{len(content)} bytes are no chunks of {dims} dims")
    tensor = np.frombuffer(content, "<i4", count)
    file = np.frombuffer(content, "<i4", count, 4 * count)
    offset = np.frombuffer(content, "<i8", count * dims, 8 * count).reshape(count, dims)
    size = np.frombuffer(content, "<i8", count * dims, 8 * count * (1 + dims)).reshape(count, dims)
    for column, limit, noun in ((tensor, len(shapes), "tensor"), (file, files, "file")):
        if count and not (column.min() >= 0 and column.max() < limit):
            raise ValueError(f"a chunk is of a {noun} that is not listed")
    is_unused = np.arange(dims) >= np.array([len(shape) for shape in shapes], np.int64)[tensor, None]
    if (offset[is_unused] != 0).any() or (size[is_unused] != 1).any():
        raise ValueError("a chunk has more dims than its tensor")
    key = tensor.astype(np.int64) * files + file
    if (np.diff(key) <= 0).any():
        raise ValueError("chunks are not in order, or a tensor has two in one file")
    return Columns(shapes, tensor, file, offset, size)


def check_sizes(columns: Columns, itemsizes: Sequence[int], files: Mapping[str, int]) -> None:
    """Raise ValueError if a file (name → bytes) is too small for its chunks, which are inside their tensors.

    Memory is allocated by the shapes of tensors. Sums are rounded; a file's header is compared exactly.
    """
    names = list(files)
    volume = columns.size.astype(np.float64).prod(1) * np.array(itemsizes, np.float64)[columns.tensor]
    needed = np.bincount(columns.file, volume, len(names))
    for name, count in zip(names, needed.tolist(), strict=True):
        if count * (1 - 1e-9) > files[name]:
            raise ValueError(f"{name} of {files[name]} bytes cannot hold {count:.0f} bytes of tensors")


def first_tiling_problem(
    names: Iterable[str], shapes: Iterable[Shape], chunks: Iterable[Chunks]
) -> str | None:
    """Return the first tensor that its chunks do not tile, with the reason; None if all are tiled."""
    for name, shape, tensor_chunks in zip(names, shapes, chunks, strict=True):
        if problem := tiling_problem(shape, tensor_chunks):
            return f"{name}: {problem}"
    return None


def tiling_problem(shape: Shape, chunks: Chunks) -> str | None:
    """Return why chunks do not hold each element of a tensor exactly once; None if they do.

    Chunks tile a tensor if they lie inside it, have as many elements, and the corners that an odd number of
    them share are the tensor's corners: then an odd number of chunks holds each element.
    """
    full, offset, size = np.array(shape, np.int64), chunks.offset, chunks.size
    inside = ((offset >= 0) & (size >= 1) & (size <= full) & (offset <= full - size)).all(1)
    if not inside.all():
        row = int(inside.argmin())
        piece = Region(tuple(offset[row].tolist()), tuple(size[row].tolist()))
        return f"piece {describe(piece)} is not inside shape {list(shape)}"
    count = prod(shape)
    # A forged shape may have more elements than an int64 counts.
    volumes = size.prod(1).tolist() if count < 1 << 62 else map(prod, size.tolist())
    if (stored := sum(volumes)) != count:
        reason = "there is a hole" if stored < count else "pieces overlap"
        return f"its {len(chunks)} pieces hold {stored} of {count} elements: {reason}"
    if len(chunks) <= 1:
        return None
    dims = np.flatnonzero((size != full).any(0))
    if len(chunks) << len(dims) > MOST_CORNERS or prod((full[dims] + 1).tolist()) >= 1 << 62:
        return f"its {len(chunks)} pieces are split along too many dims"

    def odd_corners(low: Ints, high: Ints) -> Ints:
        """Return the numbers of the corners that an odd number of pieces `low` to `high` share, sorted."""
        corners = np.zeros((len(low), 1), np.int64)
        for dim in dims:
            corners = corners * (full[dim] + 1)
            corners = np.concatenate([corners + low[:, dim, None], corners + high[:, dim, None]], 1)
        numbers, counts = np.unique(corners, return_counts=True)
        odd: Ints = numbers[counts % 2 == 1]
        return odd

    full_corners = odd_corners(np.zeros_like(full)[None], full[None])
    if not np.array_equal(odd_corners(offset, offset + size), full_corners):
        return f"its {len(chunks)} pieces hold {stored} of {count} elements: pieces overlap"
    return None
