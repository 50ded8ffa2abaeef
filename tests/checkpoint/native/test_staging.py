"""A shard file staged in memory is, on disk, the file that the streaming writer makes."""

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mlm.checkpoint.native.shard_file import write_shard_file
from mlm.checkpoint.native.staging import ALIGNMENT, BLOCK, StagedFile
from mlm.util.files import digest_file

SAVE_ID = "0123456789abcdef0123456789abcdef"


def tensors() -> dict[str, Tensor]:
    """Every element size, strides of every kind, no dims, more than a block of bytes."""
    draw = torch.Generator().manual_seed(0)
    floats = torch.randn(7, 10, generator=draw)
    return {
        "columns": floats[:, 2:5],
        "transposed": floats.t(),
        "bf16": floats.bfloat16()[1:],
        "f64": floats.double(),
        "bytes": torch.arange(11, dtype=torch.uint8),
        "bools": floats > 0,
        "scalar": torch.tensor(3.5),
        "long row": torch.randn(2, BLOCK // 8 + 3, generator=draw),
        "many rows": torch.randn(4007, 100, generator=draw),
    }


def stage(values: dict[str, Tensor], path: Path, file: StagedFile | None = None) -> Any:
    staged = file or StagedFile()
    staged.fill(values, SAVE_ID)
    return staged.write(path)


def test_a_staged_file_is_byte_for_byte_the_streamed_one(tmp_path: Path) -> None:
    staged = stage(tensors(), tmp_path / "staged")
    streamed = write_shard_file(tmp_path / "streamed", tensors(), SAVE_ID)
    assert (tmp_path / "staged").read_bytes() == (tmp_path / "streamed").read_bytes()
    assert staged == streamed
    assert staged.digest == digest_file(tmp_path / "staged")


@pytest.mark.parametrize("sizes", [(100_000, 10, 50_000), (10, 100_000)], ids=str)
def test_memory_that_held_another_save_leaves_no_trace(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    staged = StagedFile()
    for number, size in enumerate(sizes):
        values = {"x": torch.full((size,), float(number + 1))}
        stage(values, tmp_path / str(number), staged)
        write_shard_file(tmp_path / "streamed", values, SAVE_ID)
        assert (tmp_path / str(number)).read_bytes() == (tmp_path / "streamed").read_bytes()
        (tmp_path / "streamed").unlink()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("when", ["open", "write"])
def test_a_file_system_without_direct_writes_gets_plain_ones(tmp_path: Path, when: str, number: int) -> None:
    direct, really = set[int](), {"open": os.open, "write": os.write}

    def fake_open(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and when == "open":
            raise OSError(number, os.strerror(number))
        descriptor = really["open"](path, flags & ~os.O_DIRECT, mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def fake_write(descriptor: int, content: Any) -> int:
        if descriptor in direct:
            raise OSError(number, os.strerror(number))
        return int(really["write"](descriptor, content))

    with mock.patch.object(os, "open", fake_open), mock.patch.object(os, "write", fake_write):
        staged = stage(tensors(), tmp_path / "staged")
    assert staged.digest == digest_file(tmp_path / "staged")


def test_writes_are_aligned_as_direct_writes_must_be(tmp_path: Path) -> None:
    written, write = [], os.write

    def noting(descriptor: int, content: Any) -> int:
        written.append(len(content))
        return write(descriptor, content)

    with mock.patch.object(os, "write", noting):
        stage(tensors(), tmp_path / "staged")
    assert all(count % ALIGNMENT == 0 for count in written)


def test_what_fails_while_copying_is_raised_where_the_file_is_written(tmp_path: Path) -> None:
    """The ranks tell each other there; an error before would leave them waiting."""
    staged = StagedFile()
    with mock.patch("mlm.checkpoint.native.staging.mmap.mmap", side_effect=MemoryError("no memory left")):
        staged.fill(tensors(), SAVE_ID)
    with pytest.raises(MemoryError, match="no memory left"):
        staged.write(tmp_path / "file")
