"""Writing of a checkpoint in one process, a piece of a tensor at a time, for resharding and imports."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from mlm.checkpoint.native.columns import Chunk
from mlm.checkpoint.native.declaration import file_name
from mlm.checkpoint.native.folders import point_latest, step_name
from mlm.checkpoint.native.format import JSON, FileEntry, Manifest, TensorEntry, canonical, write_manifest
from mlm.checkpoint.native.shard_file import Form, write_stream
from mlm.checkpoint.native.slices import Read, Region
from mlm.util.files import digest_bytes, fsync_directory

T = TypeVar("T")
Pieces = dict[str, dict[str, Region]]
"""File name -> tensor name -> region of the tensor in the file."""
WriteFile = Callable[[Path, Callable[[], JSON]], JSON]
"""Call a function that writes a file, unless the file is already complete; return the function's result."""


def write_anew(path: Path, write: Callable[[], JSON]) -> JSON:
    return write()


def group_by_size(items: Iterable[T], size: Callable[[T], int], most: int) -> list[list[T]]:
    """Distribute items over groups of at most `most` bytes, in order; a larger item has its own."""
    groups: list[list[T]] = [[]]
    group_bytes = 0
    for item in items:
        if groups[-1] and group_bytes + size(item) > most:
            groups.append([])
            group_bytes = 0
        groups[-1].append(item)
        group_bytes += size(item)
    return groups


def derived_id(value: JSON) -> str:
    """Return a save id, in hex, that is a function of a JSON value."""
    return digest_bytes(canonical(value)).removeprefix("xxh3:")


def write_streamed(
    root: Path,
    step: int,
    tensors: Mapping[str, TensorEntry],
    read_region: Read,
    *,
    save_id: str,
    state: Mapping[str, JSON],
    tp: int = 1,
    stage_rank: Callable[[int | str], int] = lambda stage: 0,
    progress: Callable[[int], None] = lambda count: None,
    write_file: WriteFile = write_anew,
) -> Path:
    """Write `root/step-…` as tp * pp ranks would, with one piece of one tensor in memory.

    File number p * tp + t holds the shards of tp rank t of pipeline rank p = stage_rank(split.stage). The
    bytes are a function of the arguments alone: derive `save_id` from content and layout (`derived_id`).
    `read_region(name, region)` returns a piece, on the CPU, in the tensor's dtype; `progress` receives bytes
    written. `write_file` writes each shard file, or keeps a complete one.

    `root` is a new folder that the caller publishes at the end: see `new_folder`. Raises OSError, and as
    `read_region` does.
    """
    pieces, directory = shard_by_file(tensors, tp, stage_rank), root / step_name(step)
    directory.mkdir(parents=True, exist_ok=True)

    def write(name: str) -> JSON:
        regions = pieces[name]
        entry = write_stream(
            directory / name,
            {n: Form(tensors[n].dtype, region.size) for n, region in regions.items()},
            lambda n: read_region(n, regions[n]),
            {"save_id": save_id},
            progress,
        )
        return [entry.bytes, entry.digest, list(entry.blocks)]

    files = {}
    for name in pieces:
        size, digest, blocks = write_file(directory / name, partial(write, name))
        files[name] = FileEntry(size, digest, tuple(blocks))
    entries = {
        name: replace(
            tensor,
            chunks=tuple(Chunk(file, regions[name]) for file, regions in pieces.items() if name in regions),
        )
        for name, tensor in tensors.items()
    }
    write_manifest(directory, Manifest(step, save_id, entries, files, state))
    fsync_directory(directory)
    point_latest(root, step)
    return directory


def shard_by_file(
    tensors: Mapping[str, TensorEntry], tp: int, stage_rank: Callable[[int | str], int]
) -> Pieces:
    """Return the content of each file, in the order of the files, without empty files."""
    pieces: Pieces = {}
    for name, tensor in tensors.items():
        split, first = tensor.split, stage_rank(tensor.split.stage) * tp
        for rank in range(1 if split.tp_dim is None else tp):
            offset, size = [0] * len(tensor.shape), list(tensor.shape)
            if split.tp_dim is not None:
                rows = split.rows(tensor.shape[split.tp_dim], tp, rank)
                offset[split.tp_dim], size[split.tp_dim] = rows.start, len(rows)
            piece = Region(tuple(offset), tuple(size))
            if piece.volume:
                pieces.setdefault(file_name(first + rank), {})[name] = piece
    return dict(sorted(pieces.items()))
