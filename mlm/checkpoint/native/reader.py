"""Reading of a checkpoint's shard files: the bytes that are used are the bytes that were digested.

The manifest holds a digest of each block of a file. A block is read, compared, and used from memory.
"""

import os
import stat
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
from mlm.checkpoint.native.format import RESTORE, FileEntry, Manifest
from mlm.checkpoint.native.shard_file import Stored, parse_header
from mlm.checkpoint.native.slices import Region, TensorShard
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import digest_name

BLOCK = 1 << 24  # bytes of rows read at a time: 16 MiB
Progress = Callable[[int], None]


class CheckedFile(AbstractContextManager["CheckedFile"]):
    """A shard file open for reading; a context manager. Has what of a binary file `copy_region` uses.

    Attributes:
        name:    its path
        size:    its bytes, as the manifest says and on the disk
        checked: numbers of the blocks whose digest was compared
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        """Open the file.

        Raises CorruptFileError when it is missing, no regular file, or of another size; OSError.
        """
        self.name, self.size, self._blocks = str(path), entry.bytes, entry.blocks
        self.checked: set[int] = set()
        self._position, self._held, self._buffer = 0, -1, bytearray()
        size = layout.regular_size(path)
        if size != entry.bytes:
            raise CorruptFileError(f"{path}: {size} bytes, the manifest says {entry.bytes}. {RESTORE}")
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            os.close(self._descriptor)
            raise CorruptFileError(f"{path}: replaced while it was opened. {RESTORE}")

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._held, self._buffer = -1, bytearray()
        os.close(self._descriptor)

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, count: int) -> bytes:
        """At most `count` bytes, not compared: for the header, which names damage better than a digest."""
        content = os.pread(self._descriptor, count, self._position)
        self._position += len(content)
        return content

    def readinto(self, target: memoryview) -> int:
        """Fill `target` as far as the file goes. Raises CorruptFileError for a block that is damaged."""
        count, done = max(0, min(len(target), self.size - self._position)), 0
        while done < count:
            number, begin = divmod(self._position + done, layout.DIGEST_BLOCK)
            block = self._fetch(number)[begin:]
            piece = min(len(block), count - done)
            target[done : done + piece] = block[:piece]
            done += piece
        self._position += done
        return done

    def check_all(self, progress: Progress = lambda count: None) -> None:
        """Compare every block that no read has compared. Raises CorruptFileError."""
        for number in range(len(self._blocks)):
            if number not in self.checked:
                progress(len(self._fetch(number)))

    def _fetch(self, number: int) -> memoryview:
        """A block, from memory if it was the last one."""
        begin = number * layout.DIGEST_BLOCK
        size = min(layout.DIGEST_BLOCK, self.size - begin)
        if len(self._buffer) < size:
            self._buffer, self._held = bytearray(size), -1
        view = memoryview(self._buffer)[:size]
        if self._held != number:
            self._held, done = -1, 0
            while done < size and (count := os.preadv(self._descriptor, [view[done:]], begin + done)):
                done += count
            digest, expected = digest_name(xxhash.xxh3_128(view[:done])), self._blocks[number]
            if done < size or digest != expected:
                raise CorruptFileError(
                    f"{self.name}: damaged, digest {digest} from byte {begin} on, not {expected}. {RESTORE}"
                )
            self._held = number
            self.checked.add(number)
        return view


@dataclass(frozen=True)
class Reading:
    """The part `region` of the stored `chunk` of tensor `name` goes into `target`, a view of that shape."""

    name: str
    dtype: torch.dtype
    chunk: Region
    region: Region
    target: Tensor


def plan_reading(manifest: Manifest, wanted: Mapping[str, TensorShard]) -> dict[str, list[Reading]]:
    """Return what to read of each file. The chunks tile each tensor, so every wanted element is read once."""
    readings: defaultdict[str, list[Reading]] = defaultdict(list)
    for name, shard in wanted.items():
        if name not in manifest.tensors or not shard.tensor.numel():
            continue
        entry = manifest.tensors[name]
        for chunk in entry.overlapping(shard.region):
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
        """The tensors of a file, every offset checked against its size, and its save id against ours."""
        if file not in self._headers:
            self._headers[file] = read_header(self._file(file), self.manifest.save_id)
        return self._headers[file]

    def check(self, file: str, readings: Iterable[Reading] = ()) -> None:
        """Check size, save id and header of a file, and that it holds what will be read; no tensor is."""
        stored = self.header(file)
        for part in readings:
            if part.name not in stored or stored[part.name][:2] != (part.dtype, part.chunk.size):
                raise CorruptFileError(
                    f"{self.directory / file}: does not hold {part.name} as listed. {RESTORE}"
                )

    def copy(self, file: str, readings: Iterable[Reading]) -> None:
        """Fill the targets of some readings of a file, in the order of the file."""
        stored = self.header(file)
        for part in sorted(readings, key=lambda part: stored[part.name].begin):
            copy_region(self._file(file), stored[part.name], part.region, part.chunk, part.target)

    def check_all(self, file: str, progress: Progress = lambda count: None) -> None:
        """Compare every block of a file that no `copy` has compared, with its digest."""
        self._file(file).check_all(progress)

    def read(self, name: str, region: Region) -> Tensor:
        """Return those elements, on CPU, of the stored dtype."""
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
    """The tensors of an open shard file, every offset checked against its size.

    Raises CorruptFileError when it is not safetensors, or of another save.
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
    one. Reads whole rows of dim 0, at most BLOCK bytes (or one row) at a time. Raises CorruptFileError when
    the file ends early, UserError when a finite number would become infinite in the dtype of `target`.
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
