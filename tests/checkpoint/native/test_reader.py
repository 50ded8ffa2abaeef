"""The bytes that are loaded are the bytes that were digested."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mlm.checkpoint.native import format as layout
from mlm.checkpoint.native import reader as reader_module
from mlm.checkpoint.native.format import read_manifest
from mlm.checkpoint.native.reader import Reader
from mlm.checkpoint.native.slices import Region
from mlm.util.errors import CorruptFileError
from tests.checkpoint.native.helpers import load, save
from tests.checkpoints_on_disk import flip

FILE = "rank-00000.safetensors"
BLOCK = 64


def numbers() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(96.0).view(24, 4), "b": torch.arange(7.0)}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in numbers().items()}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(layout, "DIGEST_BLOCK", BLOCK)
    return save(tmp_path, 1, numbers())


def test_a_byte_that_changes_after_verifying_reaches_no_tensor(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_region = reader_module.copy_region

    def flip_and_copy(f: Any, *rest: Any) -> None:
        monkeypatch.setattr(reader_module, "copy_region", copy_region)
        flip(path / FILE, -1)
        copy_region(f, *rest)

    monkeypatch.setattr(reader_module, "copy_region", flip_and_copy)
    with pytest.raises(CorruptFileError, match=f"{FILE}: damaged"):
        load(path, zeros())


def test_a_damaged_byte_that_nobody_asked_for_is_an_error_too(path: Path) -> None:
    flip(path / FILE, -1)
    with pytest.raises(CorruptFileError, match=f"{FILE}: damaged"):
        load(path, {"b": torch.zeros(7)}, allow_extra=lambda name: True)


def test_readers_in_one_process_compare_what_they_read(path: Path) -> None:
    """The reader that `mlm reshard` and `mlm export hf` copy from."""
    flip(path / FILE, -1)
    with Reader(path, read_manifest(path)) as reader:
        assert torch.equal(reader.read("b", Region((0,), (7,))), numbers()["b"])
        with pytest.raises(CorruptFileError, match="damaged"):
            reader.read("w", Region((0, 0), (24, 4)))
