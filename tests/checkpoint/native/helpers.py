"""Checkpoints of tests: saved by any number of ranks in one process, loaded whole."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from mlm.checkpoint.native import declaration, save_load
from mlm.checkpoint.native.columns import Chunk, Chunks, tiling_problem
from mlm.checkpoint.native.folders import open_staging, step_name
from mlm.checkpoint.native.format import MANIFEST, Manifest, canonical, pack, unpack
from mlm.checkpoint.native.save_load import TensorShard, load_checkpoint, save_checkpoint
from mlm.checkpoint.native.slices import Region
from mlm.util.files import digest_bytes


def weights(value: float = 1.0) -> dict[str, Tensor]:
    return {"w": torch.full((6, 4), value), "b": torch.full((3,), value)}


def save(root: Path, step: int, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    shards = {name: TensorShard.full(tensor) for name, tensor in tensors.items()}
    return save_checkpoint(
        root, step, shards, **({"state": {"step": step}, "keep_last": 2, "keep_every": 0} | settings)
    )


def load(path: Path, tensors: Mapping[str, Tensor], **settings: Any) -> Manifest:
    return load_checkpoint(path, {n: TensorShard.full(t) for n, t in tensors.items()}, **settings)


def save_unchecked(root: Path, step: int, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    """Save without norms, whatever the numbers."""
    with mock.patch.object(save_load, "with_norms", lambda entries, parts, before: entries):
        return save(root, step, tensors, **settings)


def save_pieces(root: Path, step: int, ranks: Sequence[Mapping[str, TensorShard]]) -> Path:
    """Save as `save_checkpoint` does on several ranks, in one process."""
    save_id = uuid.uuid4().hex
    declared = [declaration.declare_shards(shards, step, step) for shards in ranks]
    tensors = declaration.merge_declared(root, declared)
    staging = open_staging(root, step, save_id)
    files = {}
    for rank, shards in enumerate(ranks):
        if entry := save_load.write_shards(staging, rank, shards, save_id):
            files[declaration.file_name(rank)] = save_load.file_entry(entry)
    save_load.publish_manifest(staging, root, Manifest(step, save_id, tensors, files, {"step": step}))
    return root / step_name(step)


def pieces(full: Tensor, grid: Sequence[Sequence[int]]) -> list[TensorShard]:
    """Cut `full` at the given row (and column, …) boundaries; the shards are views, not copies."""
    shards = [(full, [0] * full.ndim)]
    for dim, cuts in enumerate(grid):
        edges = [0, *cuts, full.shape[dim]]
        shards = [
            (piece.narrow(dim, a, b - a), [*offset[:dim], a, *offset[dim + 1 :]])
            for piece, offset in shards
            for a, b in pairwise(edges)
        ]
    return [TensorShard(piece, tuple(full.shape), tuple(offset)) for piece, offset in shards]


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], Any], *, sign: bool = True) -> None:
    """Change a manifest as an adversary would: with a digest that matches, unless told not to sign."""
    body = json.loads((path / MANIFEST).read_bytes())
    edit(body)
    if sign:
        body.pop("digest", None)
        body["digest"] = digest_bytes(canonical(body))
    (path / MANIFEST).write_bytes(canonical(body))


def edit_chunks(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the columns of chunks in a manifest, signed."""
    edit_manifest(path, lambda body: forge_chunks(body, edit))


def forge_chunks(body: dict[str, Any], edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the columns of chunks: `edit` receives tensor, file, offset and size as arrays."""
    dims = max(1, *(len(tensor["shape"]) for tensor in body["tensors"].values()))
    content = unpack(body["chunks"])
    count = len(content) // (8 + 16 * dims)
    numbers = np.frombuffer(content[: 8 * count], "<i4").reshape(2, count).copy()
    places = np.frombuffer(content[8 * count :], "<i8").reshape(2, count, dims).copy()
    columns = dict(zip(("tensor", "file", "offset", "size"), (*numbers, *places), strict=True))
    edit(columns)
    body["chunks"] = pack(b"".join(column.tobytes() for column in columns.values()))


def tiling_of(shape: tuple[int, ...], regions: Sequence[Region]) -> str | None:
    """Why the regions do not hold each element of a tensor once; None if they do."""
    chunks = [Chunk(f"{number:04d}", region) for number, region in enumerate(regions)]
    return tiling_problem(shape, Chunks.of(chunks, len(shape)))
