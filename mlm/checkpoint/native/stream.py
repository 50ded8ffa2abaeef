"""Writing a checkpoint in one process, a piece of a tensor at a time: for resharding and imports.

The files lie in a hidden directory until all are there, as those of a training save do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.columns import Chunk
from mlm.checkpoint.native.declaration import file_name
from mlm.checkpoint.native.folders import (
    checkpoints,
    clear_up,
    discard,
    latest_name,
    open_staging,
    point_latest,
    publish,
    staging_path,
    step_name,
)
from mlm.checkpoint.native.format import (
    JSON,
    CheckpointError,
    Manifest,
    TensorEntry,
    canonical,
    read_manifest_head,
    write_manifest,
)
from mlm.checkpoint.native.save_load import REMEDIES
from mlm.checkpoint.native.shard_file import Form, write_stream
from mlm.checkpoint.native.slices import Region, Split
from mlm.util.errors import UserError
from mlm.util.files import digest_bytes

Read = Callable[[str, Region], Tensor]
Pieces = dict[str, dict[str, Region]]
"""File name → tensor name → the region of the tensor that the file holds."""


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor to write, not yet read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    split: Split
    norm: float | None = None
    norm_before: float | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def derived_id(value: JSON) -> str:
    """A save id that is a function of what is saved: the same for equal JSON values, in hex."""
    return digest_bytes(canonical(value)).removeprefix("xxh3:")


def write_streamed(
    root: Path,
    step: int,
    tensors: Mapping[str, GlobalTensor],
    read: Read,
    *,
    save_id: str,
    state: Mapping[str, JSON],
    tp: int = 1,
    stage_rank: Callable[[int | str], int] = lambda stage: 0,
    progress: Callable[[int], None] = lambda count: None,
) -> Path:
    """Write `root/step-…` as tp * pp ranks would, holding one piece of one tensor at a time, and publish it.

    File number p * tp + t holds what tp rank t of pipeline rank p = stage_rank(split.stage) owns. The bytes
    are a function of the arguments alone. `read(name, region)` gives a piece, on CPU, of the tensor's
    dtype, and raises no bare OSError; `progress` receives bytes of tensors written.

    A kill at any instant leaves nothing under a final name, or the whole; the next call with this `step` and
    `save_id` begins again, or returns at once when the checkpoint is there: `save_id` must therefore be a
    function of content and layout (`derived_id`). One process at a time: see lock.py.

    Raises UserError when another checkpoint is in `root`, CheckpointError when the disk does not take it,
    and what `read` raises.
    """
    pieces, staging = shard_by_file(tensors, tp, stage_rank), staging_path(root, step, save_id)
    entries = {name: _entry(tensor, name, pieces) for name, tensor in tensors.items()}
    try:
        if (path := published(root, step, save_id)) is not None:
            if latest_name(root) != path.name:  # killed between the two
                point_latest(root, step)
            clear_up(root)
            return path
        files, _ = {}, open_staging(root, step, save_id)
        for name, held in pieces.items():
            files[name] = write_stream(
                staging / name,
                {n: Form(tensors[n].dtype, piece.size) for n, piece in held.items()},
                lambda n, held=held: read(n, held[n]),  # type: ignore[misc]
                {"save_id": save_id},
                progress,
            )
        manifest = Manifest(step, save_id, entries, files, state)
        write_manifest(staging, manifest)
        publish(staging, root, manifest)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "Fix it, or set out=… to another directory")
        raise CheckpointError(
            f"{error.filename or root}: could not be written: {error.strerror or error}. {remedy}"
        ) from error
    finally:
        discard(staging)
    return root / step_name(step)


def shard_by_file(
    tensors: Mapping[str, GlobalTensor], tp: int, stage_rank: Callable[[int | str], int]
) -> Pieces:
    """Return the content of each file, in the order of the files; empty ones are left out."""
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


def published(root: Path, step: int, save_id: str) -> Path | None:
    """The checkpoint that an earlier call with these arguments published, if there is one.

    Raises UserError when `root` holds another: none is ever overwritten.
    """
    for path in checkpoints(root).values():
        try:
            is_it = path.name == step_name(step) and read_manifest_head(path).save_id == save_id
        except UserError:  # damaged: still not ours to replace
            is_it = False
        if not is_it:
            raise UserError(
                f"{path}: another checkpoint is there, and none is overwritten. "
                "Set out=… to a new directory, or delete that one"
            )
        return path
    return None


def _entry(tensor: GlobalTensor, name: str, pieces: Pieces) -> TensorEntry:
    chunks = tuple(Chunk(file, held[name]) for file, held in pieces.items() if name in held)
    return TensorEntry(tensor.shape, tensor.dtype, chunks, tensor.split, tensor.norm, tensor.norm_before)
