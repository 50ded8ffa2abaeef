"""Writing a checkpoint in one process, a piece of a tensor at a time: for resharding and imports.

The files lie in a hidden directory until all are there, as those of a training save do. Beside each complete
one stands a note of its size and digest (`rank-00000.safetensors.done`), so that a second try with the same
arguments writes only what is missing. Once the manifest is there, it takes the notes' place.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.columns import Chunk
from mlm.checkpoint.native.declaration import file_name
from mlm.checkpoint.native.folders import (
    checkpoints,
    clear_up,
    named_latest,
    open_staging,
    point_latest,
    publish,
    step_name,
)
from mlm.checkpoint.native.format import (
    JSON,
    MANIFEST,
    CheckpointError,
    FileEntry,
    Manifest,
    TensorEntry,
    canonical,
    encode_manifest,
    read_manifest,
    read_summary,
    regular_size,
    write_manifest,
)
from mlm.checkpoint.native.save_load import REMEDIES
from mlm.checkpoint.native.shard_file import Form, read_header, write_stream
from mlm.checkpoint.native.slices import Region, Split, tiling_problem
from mlm.util.atomic import digest_bytes, digest_file, parse_json, read_bounded, write_atomic
from mlm.util.errors import CorruptFileError, UserError

DONE = ".done"
MAX_NOTE = 1 << 24  # bytes of a note: digests of the blocks of 6 TB

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

    A kill at any instant leaves nothing under a final name, or the whole. The next call with this `step` and
    `save_id` continues after the last complete file, and returns at once when all is there: `save_id` must
    therefore be a function of content and layout (`derived_id`). One process at a time: see lock.py.

    Raises UserError when another checkpoint is in `root`, CheckpointError when the disk does not take it,
    and what `read` raises.
    """
    pieces = shard_by_file(tensors, tp, stage_rank)
    entries = {name: _entry(name, tensor, pieces) for name, tensor in tensors.items()}
    try:
        if (path := published(root, step, save_id)) is not None:
            _check_same(path, Manifest(step, save_id, entries, read_manifest(path).files, state))
            clear_up(root)
            if named_latest(root) != path.name:  # killed between the two
                point_latest(root, step)
            return path
        staging = open_staging(root, step, save_id, keep=True)
        known = _complete_files(staging, set(pieces))
        files = {}
        for name, held in pieces.items():
            forms = {n: Form(tensors[n].dtype, piece.size) for n, piece in held.items()}
            entry = _reusable(staging / name, known.get(name), forms, save_id)
            if entry:
                progress(sum(form.num_bytes for form in forms.values()))
            else:
                entry = _write_file(staging / name, forms, held, read, save_id, progress)
            files[name] = entry
        _publish(staging, root, Manifest(step, save_id, entries, files, state))
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "Fix it, or set out=… to another directory")
        raise CheckpointError(
            f"{error.filename or root}: could not be written: {error.strerror or error}. {remedy}; "
            "the same command then continues from the files that are complete"
        ) from error
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
            is_it = path.name == step_name(step) and read_manifest(path).save_id == save_id
        except UserError:  # damaged: still not ours to replace
            is_it = False
        if not is_it:
            raise UserError(
                f"{path}: another checkpoint is there, and none is overwritten. "
                "Set out=… to a new directory, or delete that one"
            )
        return path
    return None


def _entry(name: str, tensor: GlobalTensor, pieces: Pieces) -> TensorEntry:
    chunks = tuple(Chunk(file, held[name]) for file, held in pieces.items() if name in held)
    problem = tiling_problem(tensor.shape, [chunk.region for chunk in chunks])
    assert problem is None, f"{name}: {problem}"
    return TensorEntry(tensor.shape, tensor.dtype, chunks, tensor.split, tensor.norm, tensor.norm_before)


def _check_same(path: Path, meant: Manifest) -> None:
    """That a published checkpoint is the one meant, with files of the right size."""
    try:
        same = (path / MANIFEST).read_bytes() == encode_manifest(meant)
        same = same and all(regular_size(path / n) == entry.bytes for n, entry in meant.files.items())
    except CorruptFileError:
        same = False
    if not same:
        raise CorruptFileError(f"{path}: damaged since it was written. Delete it, and run this again")


def _complete_files(staging: Path, names: set[str]) -> dict[str, FileEntry]:
    """The files an earlier try completed, by its notes or its manifest; all else is deleted."""
    known: dict[str, FileEntry] = {}
    try:
        known = dict(read_summary(staging).files)
    except UserError:
        for path in staging.glob(f"*{DONE}"):
            try:
                known[path.name.removesuffix(DONE)] = _noted(parse_json(read_bounded(path, MAX_NOTE, "")))
            except (ValueError, TypeError, KeyError):  # KeyError: of an older version
                continue
    kept = {name: entry for name, entry in known.items() if name in names}
    stay = {*kept, *(f"{name}{DONE}" for name in kept)}
    for path in staging.iterdir():
        if path.name not in stay:
            path.unlink()
    return kept


def _noted(said: JSON) -> FileEntry:
    """A note's file entry. Raises TypeError, KeyError."""
    return FileEntry(said["bytes"], said["digest"], tuple(said["blocks"]))


def _reusable(
    path: Path, entry: FileEntry | None, forms: Mapping[str, Form], save_id: str
) -> FileEntry | None:
    """`entry` if the file matches it and holds these tensors."""
    if entry is None:
        return None
    try:
        stored = read_header(path, entry, save_id)
    except CorruptFileError:
        return None
    held = {name: Form(tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    return entry if held == forms and digest_file(path) == entry.digest else None


def _write_file(
    path: Path,
    forms: Mapping[str, Form],
    held: Mapping[str, Region],
    read: Read,
    save_id: str,
    progress: Callable[[int], None],
) -> FileEntry:
    path.unlink(missing_ok=True)
    entry = write_stream(path, forms, lambda name: read(name, held[name]), {"save_id": save_id}, progress)
    write_atomic(path.with_name(f"{path.name}{DONE}"), json.dumps(asdict(entry)).encode())
    return entry


def _publish(staging: Path, root: Path, manifest: Manifest) -> None:
    write_manifest(staging, manifest)
    for note in staging.glob(f"*{DONE}"):
        note.unlink()
    publish(staging, root, manifest)
