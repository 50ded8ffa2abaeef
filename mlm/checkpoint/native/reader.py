"""Reading of a checkpoint's shard files, every byte verified before use.

The manifest holds a digest of each block of a file. A block is read once, compared, and used from memory.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from mlm.checkpoint.native import format as layout
from mlm.checkpoint.native.columns import Chunks
from mlm.checkpoint.native.format import RESTORE, FileEntry, Manifest
from mlm.checkpoint.native.shard_file import Stored, parse_header
from mlm.checkpoint.native.slices import Region, TensorShard
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import digest_name

BLOCK = 1 << 24  # bytes of rows read at a time: 16 MiB
Progress = Callable[[int], None]


class CheckedFile(AbstractContextManager["CheckedFile"]):
    """A shard file open for reading, with the methods of a binary file that `copy_region` uses.

    Attributes:
        name:    path
        size:    bytes, in the manifest and on the disk
        checked: numbers of the blocks whose digest was compared
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        """Open the file. Raises OSError, and CorruptFileError if it is missing, a link or of another size."""
        self.name, self.size, self._blocks = str(path), entry.bytes, entry.blocks
        self.checked: set[int] = set()
        self._position, self._buffered, self._buffer = 0, -1, bytearray()
        size = layout.regular_size(path)
        if size != entry.bytes:
            raise CorruptFileError(f"{path}: {size} bytes, the manifest says {entry.bytes}. {RESTORE}")
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._buffered, self._buffer = -1, bytearray()
        os.close(self._descriptor)

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, count: int) -> bytes:
        """Read at most `count` bytes, not verified: a damaged header is reported better than its digest."""
        content = os.pread(self._descriptor, count, self._position)
        self._position += len(content)
        return content

    def readinto(self, target: memoryview) -> int:
        """Fill `target` as far as the file goes. Raises CorruptFileError for a block that is damaged."""
        count, copied = max(0, min(len(target), self.size - self._position)), 0
        while copied < count:
            number, begin = divmod(self._position + copied, layout.DIGEST_BLOCK)
            block = self._fetch(number)[begin:]
            piece = min(len(block), count - copied)
            target[copied : copied + piece] = block[:piece]
            copied += piece
        self._position += copied
        return copied

    def check_all(self, progress: Progress = lambda count: None) -> None:
        """Compare every block that no read has compared. Raises CorruptFileError."""
        for number in range(len(self._blocks)):
            if number not in self.checked:
                progress(len(self._fetch(number)))

    def _fetch(self, number: int) -> memoryview:
        """Return a block, verified; from memory if it is the last one that was read."""
        begin = number * layout.DIGEST_BLOCK
        size = min(layout.DIGEST_BLOCK, self.size - begin)
        if len(self._buffer) < size:
            self._buffer, self._buffered = bytearray(size), -1
        view = memoryview(self._buffer)[:size]
        if self._buffered != number:
            self._buffered, filled = -1, 0
            while filled < size and (count := os.preadv(self._descriptor, [view[filled:]], begin + filled)):
                filled += count
            digest, expected = digest_name(xxhash.xxh3_128(view[:filled])), self._blocks[number]
            if filled < size or digest != expected:
                raise CorruptFileError(
                    f"{self.name}: damaged, digest {digest} from byte {begin} on, not {expected}. {RESTORE}"
                )
            self._buffered = number
            self.checked.add(number)
        return view


@dataclass(frozen=True)
class Reading:
    """A read of `region` of tensor `name`, within its stored `chunk`, into `target`, a view of that shape."""

    name: str
    dtype: torch.dtype
    chunk: Region
    region: Region
    target: Tensor


def plan_reading(manifest: Manifest, shards: Mapping[str, TensorShard]) -> dict[str, list[Reading]]:
    """Return the reads of each file. The chunks tile each tensor, so every element is read once."""
    readings: defaultdict[str, list[Reading]] = defaultdict(list)
    for name, shard in shards.items():
        if name not in manifest.tensors or not shard.tensor.numel():
            continue
        entry = manifest.tensors[name]
        for chunk in Chunks.of(entry.chunks, len(entry.shape)).overlapping(shard.region):
            if region := shard.region.intersect(chunk.region):
                target = shard.tensor.detach()[region.within(shard.region)]
                readings[chunk.file].append(Reading(name, entry.dtype, chunk.region, region, target))
    return dict(readings)


class Reader(AbstractContextManager["Reader"]):
    """Reads any region of any tensor of a checkpoint, with one file open at a time.

    A context manager: leaving it closes the file. All methods raise CorruptFileError and OSError.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._headers: dict[str, dict[str, Stored]] = {}
        self._open: tuple[str, CheckedFile] | None = None

    def __exit__(self, *exception: object) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def header(self, file: str) -> dict[str, Stored]:
        if file not in self._headers:
            self._headers[file] = read_header(self._file(file), self.manifest.save_id)
        return self._headers[file]

    def check(self, file: str, readings: Iterable[Reading] = ()) -> None:
        """Check size, save id and header of a file, and that it holds the tensors of `readings`."""
        stored = self.header(file)
        for part in readings:
            if part.name not in stored or stored[part.name][:2] != (part.dtype, part.chunk.size):
                raise CorruptFileError(
                    f"{self.directory / file}: does not hold {part.name} as listed. {RESTORE}"
                )

    def copy(self, file: str, readings: Iterable[Reading]) -> None:
        """Fill the targets of readings of a file, in the order of the file."""
        stored = self.header(file)
        for part in sorted(readings, key=lambda part: stored[part.name].begin):
            copy_region(self._file(file), stored[part.name], part.region, part.chunk, part.target)

    def check_all(self, file: str) -> None:
        """Compare every block of a file that no `copy` has compared, with its digest."""
        self._file(file).check_all()

    def read(self, name: str, region: Region) -> Tensor:
        """Return the elements of `region`, on the CPU, in the stored dtype."""
        entry = self.manifest.tensors[name]
        target = torch.empty(region.size, dtype=entry.dtype)
        planned = plan_reading(self.manifest, {name: TensorShard(target, entry.shape, region.offset)})
        for file, readings in planned.items():
            self.check(file, readings)
            self.copy(file, readings)
        return target

    def _file(self, name: str) -> CheckedFile:
        if self._open is None or self._open[0] != name:
            if self._open is not None:
                self._open[1].close()
                self._open = None
            self._open = name, CheckedFile(self.directory / name, self.manifest.files[name])
        return self._open[1]


def read_header(f: CheckedFile, save_id: str) -> dict[str, Stored]:
    """Return the tensors of an open shard file, every offset checked against its size.

    Raises CorruptFileError if it is not safetensors, or of another save.
    """
    f.seek(0)
    metadata, stored = parse_header(f.read, Path(f.name), f.size, RESTORE)
    if metadata.get("save_id") != save_id:
        raise CorruptFileError(f"{f.name}: is a shard of another save. {RESTORE}")
    return stored


def copy_region(
    f: BinaryIO | CheckedFile, stored: Stored, region: Region, chunk: Region, target: Tensor
) -> None:
    """Copy the part `region` of a stored `chunk` (both in global coordinates) into `target`, in place.

    `target` has the shape of `region`, any device and strides, and the stored dtype or another floating
    one. Reads full rows of dim 0, at most BLOCK bytes (or one row) at a time. Raises CorruptFileError if the
    file ends early, UserError if a finite number would become infinite in the dtype of `target`.
    """
    columns = region.within(chunk)
    rows, tail = columns[0] if columns else slice(0, 1), stored.shape[1:]
    if not columns:
        target = target.unsqueeze(0)
    row_items = prod(tail)
    row_bytes = row_items * stored.dtype.itemsize
    step = max(1, BLOCK // row_bytes)
    buffer = bytearray(min(step, rows.stop - rows.start) * row_bytes)
    for first in range(rows.start, rows.stop, step):
        count = min(step, rows.stop - first)
        f.seek(stored.begin + first * row_bytes)
        if f.readinto(memoryview(buffer)[: count * row_bytes]) != count * row_bytes:  # type: ignore[union-attr]
            raise CorruptFileError(f"{f.name}: ends early. {RESTORE}")
        block = torch.frombuffer(buffer, dtype=stored.dtype, count=count * row_items).view(count, *tail)
        piece = block[(slice(None), *columns[1:])]
        converted = piece.to(target.dtype)
        if converted is not piece and torch.isfinite(piece).sum() != torch.isfinite(converted).sum():
            problem = f"holds numbers too large for {target.dtype}"
            raise UserError(f"{f.name}: {problem}. Load it with a wider precision.dtype")
        target[first - rows.start : first - rows.start + count].copy_(converted)
