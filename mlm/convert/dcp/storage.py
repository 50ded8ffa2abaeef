"""Tensors of a DCP folder, read by regions.

An item is an archive of torch.save that holds one tensor; its bytes are located by `unpickled.py` and never
unpickled.
"""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mlm.checkpoint.native.reader import copy_region
from mlm.checkpoint.native.shard_file import Form
from mlm.checkpoint.native.slices import Region
from mlm.convert.dcp.metadata import COPY_AGAIN, StoredPiece, StoredTensor
from mlm.convert.dcp.unpickled import DAMAGES, PickleError, check_archive, read_archive
from mlm.util.errors import CorruptFileError, UserError, reading_from
from mlm.util.files import digest_file
from mlm.util.terminal import one_line

OPEN_FILES = 64


class DCPReader:
    """Reads any region of any tensor of a folder.

    Methods raise CorruptFileError, and UserError where a file cannot be read.
    """

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.folder, self.tensors = folder, tensors
        self._open: dict[str, BinaryIO] = {}

    @property
    def files(self) -> list[str]:
        return sorted({piece.file for tensor in self.tensors.values() for piece in tensor.pieces})

    @property
    def num_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in self.files)

    def read(self, name: str, region: Region, dtype: torch.dtype | None = None) -> Tensor:
        """Return the elements of `region`, on the CPU, in `dtype`, by default the stored one."""
        tensor = self.tensors[name]
        target = torch.empty(region.size, dtype=dtype or tensor.dtype)
        for piece in tensor.pieces:
            if (common := region.intersect(piece.region)) is None:
                continue
            with self._explain_damage(name, piece):
                saved = read_archive(self._item(piece))
                stored = saved.find(saved.value)
                if stored.form != Form(tensor.dtype, piece.region.size):
                    listed = f"{tensor.dtype} {list(piece.region.size)}"
                    raise PickleError(f"is not of {listed}, as .metadata lists it")
            stored = stored._replace(begin=piece.begin + stored.begin)
            f = self._file(piece.file)
            with reading_from(self.folder / piece.file, COPY_AGAIN):
                copy_region(f, stored, common, piece.region, target[common.within(region)])
        return target

    def verify(self, progress: Callable[[int], None] = lambda count: None) -> dict[str, str]:
        """Compare every item with its checksums; return the digest of each file by its name."""
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                with self._explain_damage(name, piece):
                    check_archive(self._item(piece))
        with reading_from(self.folder, COPY_AGAIN):
            return {file: digest_file(self.folder / file, progress) for file in self.files}

    def _item(self, piece: StoredPiece) -> BinaryIO:
        return io.BufferedReader(_FileView(self._file(piece.file), piece.begin, piece.length), 1 << 16)

    @contextmanager
    def _explain_damage(self, name: str, piece: StoredPiece) -> Iterator[None]:
        try:
            yield
        except UserError:  # a ValueError, as some of DAMAGES are
            raise
        except (*DAMAGES, OSError) as error:
            raise CorruptFileError(
                f"{self.folder / piece.file}: the item at byte {piece.begin} holds no plain {name} "
                f"({one_line(error)}); nothing was executed. {COPY_AGAIN}"
            ) from error

    def _file(self, name: str) -> BinaryIO:
        if name not in self._open:
            if len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            with reading_from(self.folder, COPY_AGAIN):
                self._open[name] = open(self.folder / name, "rb", buffering=0)  # noqa: SIM115
        return self._open[name]


class _FileView(io.RawIOBase):
    """File object for `length` bytes of a file from `begin` on."""

    def __init__(self, f: BinaryIO, begin: int, length: int) -> None:
        self.f, self.begin, self.length, self.position = f, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + (0, self.position, self.length)[whence]
        if position < 0:
            raise OSError("seek before the beginning")
        self.position = position
        return position

    def readinto(self, buffer: Any) -> int:
        self.f.seek(self.begin + self.position)
        remaining = max(0, self.length - self.position)
        # zipfile would report an OSError as a damaged archive.
        with reading_from(Path(self.f.name), COPY_AGAIN):
            count = int(self.f.readinto(memoryview(buffer)[:remaining]))  # type: ignore[attr-defined]
        self.position += count
        return count
