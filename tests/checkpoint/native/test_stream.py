"""Checkpoints written a piece at a time in one process."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mlm.checkpoint.native import stream
from mlm.checkpoint.native.folders import latest_checkpoint, latest_name
from mlm.checkpoint.native.format import CheckpointError, read_manifest
from mlm.checkpoint.native.slices import Region, Split
from mlm.checkpoint.native.stream import GlobalTensor, derived_id, write_streamed
from mlm.util.errors import UserError
from tests.checkpoint.native.helpers import load, save, weights
from tests.checkpoint.native.kill_saves import kill_at_operation

FULL = {
    "table": torch.arange(20.0).view(5, 4),  # tp=2 by multiples of 4: rows 0 to 3, and row 4
    "up": torch.arange(24.0).view(6, 4) + 100,
    "down": torch.arange(24).view(4, 6),
    "norm": torch.arange(4.0).bfloat16(),
    "scale": torch.tensor(7.0),
    "none": torch.empty(0, 3),
}
SPLITS = {
    "table": Split(0, "first", 4),
    "up": Split(0, 0),
    "down": Split(1, 1),
    "norm": Split(None, "last"),
    "scale": Split(None, 0),
    "none": Split(None, 0),
}
TENSORS = {name: GlobalTensor(tuple(x.shape), x.dtype, SPLITS[name]) for name, x in FULL.items()}
SAVE_ID = derived_id(["of", "this"])


def read(name: str, piece: Region) -> Tensor:
    return FULL[name][piece.within(Region((0,) * FULL[name].ndim, tuple(FULL[name].shape)))]


def write(root: Path, read: Callable[[str, Region], Tensor] = read, **settings: object) -> Path:
    """Two tp ranks, two pipeline ranks: layer 0 in front, layer 1 behind."""
    arguments = {"save_id": SAVE_ID, "state": {"step": 3}, "tp": 2} | settings
    return write_streamed(root, 3, TENSORS, read, stage_rank=lambda s: int(s in (1, "last")), **arguments)  # type: ignore[arg-type]


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_each_rank_s_file_holds_its_pieces(tmp_path: Path) -> None:
    path = write(tmp_path)
    files = {p.name: load_file(p) for p in path.glob("*.safetensors")}
    held = {name: {key: x.tolist() for key, x in tensors.items()} for name, tensors in files.items()}
    assert held == {
        "rank-00000.safetensors": {
            "table": FULL["table"][:4].tolist(),
            "up": FULL["up"][:3].tolist(),
            "scale": 7.0,
        },
        "rank-00001.safetensors": {"table": FULL["table"][4:].tolist(), "up": FULL["up"][3:].tolist()},
        "rank-00002.safetensors": {"down": FULL["down"][:, :3].tolist(), "norm": FULL["norm"].tolist()},
        "rank-00003.safetensors": {"down": FULL["down"][:, 3:].tolist()},
    }


def test_what_is_written_loads_whole(tmp_path: Path) -> None:
    loaded = {name: torch.zeros_like(x) for name, x in FULL.items()}
    manifest = load(write(tmp_path), loaded)
    assert all(torch.equal(loaded[name], x) for name, x in FULL.items())
    assert manifest.state == {"step": 3}


def test_the_manifest_keeps_the_splits(tmp_path: Path) -> None:
    assert {name: entry.split for name, entry in read_manifest(write(tmp_path)).tensors.items()} == SPLITS


def test_progress_hears_of_every_byte(tmp_path: Path) -> None:
    heard: list[int] = []
    write(tmp_path, progress=heard.append)
    assert sum(heard) == sum(tensor.num_bytes for tensor in TENSORS.values())


def test_the_bytes_are_a_function_of_the_arguments(tmp_path: Path) -> None:
    assert content(write(tmp_path / "a")) == content(write(tmp_path / "b"))


def test_one_piece_is_held_at_a_time(tmp_path: Path) -> None:
    """A piece's memory is owned by a NumPy array that can be watched."""
    before: list[weakref.ref[np.ndarray]] = []  # type: ignore[type-arg]

    def watched(name: str, piece: Region) -> Tensor:
        assert all(ref() is None for ref in before), "another piece is still there"
        wanted = read(name, piece)
        memory = np.zeros(wanted.nbytes, np.uint8)
        before.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(wanted.dtype).view(wanted.shape).copy_(wanted)

    write(tmp_path, watched)
    assert len(before) == 8


class StoppedError(Exception):
    """Interruption of a write in the middle."""


def stop_at(tensor: str) -> Callable[[str, Region], Tensor]:
    def reading(name: str, piece: Region) -> Tensor:
        if name == tensor:
            raise StoppedError
        return read(name, piece)

    return reading


def test_a_write_that_ends_early_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        write(tmp_path, stop_at("norm"))
    assert latest_checkpoint(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_the_same_again_reads_nothing(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert write(tmp_path, stop_at("table")) == path


@pytest.mark.parametrize("other", ["content", "step"])
def test_another_checkpoint_is_not_overwritten(tmp_path: Path, other: str) -> None:
    save(tmp_path, 3 if other == "content" else 4, weights())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="none is overwritten"):
        write(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_full_disk_is_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "rank-00000.safetensors")

    monkeypatch.setattr(stream, "write_stream", full)
    with pytest.raises(CheckpointError, match=r"No space left on device\. Free space there") as told:
        write(tmp_path)
    assert "\n" not in str(told.value)


def test_killed_at_every_file_operation_the_second_try_gives_the_same_bytes(tmp_path: Path) -> None:
    """A kill leaves nothing or the whole, and the second try ends as one that was never killed."""
    straight, number, killed = content(write(tmp_path / "straight")), 0, True
    while killed:
        number += 1
        root = tmp_path / str(number)
        child = os.fork()
        if child == 0:
            kill_at_operation(number)
            write(root)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        found = latest_checkpoint(root)
        assert found is None or content(found) == straight
        assert content(write(root)) == straight
        assert latest_name(root) == "step-00000003"
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000003"]
    assert number > 20
