"""Checkpoints written a piece at a time in one process."""

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from mlm.checkpoint.native.folders import latest_checkpoint
from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.slices import Region, TensorSplit
from mlm.checkpoint.native.stream import derived_id, write_streamed
from tests.checkpoint.native.helpers import load

FULL = {
    "table": torch.arange(20.0).view(5, 4),  # tp=2 by multiples of 4: rows 0 to 3, and row 4
    "up": torch.arange(24.0).view(6, 4) + 100,
    "down": torch.arange(24).view(4, 6),
    "norm": torch.arange(4.0).bfloat16(),
    "scale": torch.tensor(7.0),
    "none": torch.empty(0, 3),
}
SPLITS = {
    "table": TensorSplit(0, "first", 4),
    "up": TensorSplit(0, 0),
    "down": TensorSplit(1, 1),
    "norm": TensorSplit(None, "last"),
    "scale": TensorSplit(None, 0),
    "none": TensorSplit(None, 0),
}
TENSORS = {name: TensorEntry(tuple(x.shape), x.dtype, SPLITS[name]) for name, x in FULL.items()}
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
    path = write(tmp_path)
    assert latest_checkpoint(tmp_path) == path
    manifest = load(path, loaded)
    assert all(torch.equal(loaded[name], x) for name, x in FULL.items())
    assert manifest.state == {"step": 3}
    assert {name: entry.split for name, entry in manifest.tensors.items()} == SPLITS


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
