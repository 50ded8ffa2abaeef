"""Save and load checkpoints atomically: any layout writes, any layout reads.

All ranks call together, and an error of one is raised on all. The guide Checkpoints specifies the format.
"""

import errno
import logging
import math
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.declaration import declare_shards, file_name, merge_declared
from mlm.checkpoint.native.exchange import ONE_RANK, Ranks
from mlm.checkpoint.native.folders import (
    candidates,
    discard,
    latest_checkpoint,
    latest_name,
    open_staging,
    publish,
    resolve,
    set_newer_aside,
    staging_path,
    step_directory_name,
    step_name,
)
from mlm.checkpoint.native.format import (
    JSON,
    RESTORE,
    CheckpointError,
    FileEntry,
    Manifest,
    NotFiniteError,
    TensorEntry,
    read_manifest,
    read_manifest_head,
    write_manifest,
)
from mlm.checkpoint.native.norms import largest_jump, norm, with_norms
from mlm.checkpoint.native.reader import Reader, Reading, plan_reading
from mlm.checkpoint.native.retention import prune
from mlm.checkpoint.native.shard_file import write_shard_file
from mlm.checkpoint.native.slices import TensorShard
from mlm.checkpoint.native.staging import StagedFile
from mlm.util.errors import UserError

log = logging.getLogger(__name__)

__all__ = [
    "CheckpointError",
    "Manifest",
    "TensorShard",
    "latest_checkpoint",
    "load_checkpoint",
    "read_manifest",
    "resolve",
    "save_checkpoint",
]

LISTED = 3  # problems that a message lists
REMEDIES = {
    errno.ENOSPC: "Free space there, or set out=… to another disk",
    errno.EDQUOT: "Free some of your quota, or set out=… to another disk",
    errno.EACCES: "Make it writable, or set out=… to a directory that is",
    errno.EPERM: "Make it writable, or set out=… to a directory that is",
    errno.EROFS: "Set out=… to a writable disk",
    errno.ENOENT: "Set out=… to a directory that all ranks share",
}


def save_checkpoint(
    root: Path,
    step: int,
    shards: Mapping[str, TensorShard],
    *,
    state: Mapping[str, JSON],
    keep_last: int,
    keep_every: int,
    ranks: Ranks = ONE_RANK,
    save_id: str | None = None,
    staged: StagedFile | None = None,
    wrong_since: Callable[[], int | None] = lambda: None,
) -> Path:
    """Write `root/step-…` from the shards of all ranks, point `latest` at it and prune old ones.

    Collective over `ranks`. Over all ranks, `shards` must hold each element of each tensor exactly once: one
    owner passes a replicated tensor. `state` is rank 0's. Returns the new directory. A kill at any instant
    leaves the previous checkpoint intact. With `staged`, a copy of `shards` filled under `save_id` (the same
    on all ranks), the copy is written, and `shards` gives only the shapes. `wrong_since` is called on rank 0
    after the write; it returns the `since` of `prune`.

    Raises CheckpointError on every rank, leaving no files, if any rank cannot write or the shards do not tile
    their tensors; NotFiniteError likewise for NaN or infinity; LostPeer if a rank does not take part.
    """
    explain = _save_explainer(root, ranks.rank)
    assert staged is None or save_id is not None, "a staged file carries its save id"
    save_id, main_step = ranks.broadcast([save_id or uuid.uuid4().hex, step])
    staging = staging_path(root, step, save_id)

    def prepare() -> dict[str, TensorEntry]:
        if not ranks.is_main:
            return {}
        merged = merge_declared(root, declared)
        open_staging(root, step, save_id)
        return merged

    try:
        declare = partial(declare_shards, shards, step, main_step)
        declared = ranks.gather_bytes(ranks.together(declare, explain))
        # Checked before a byte is written: a checkpoint that would not load may fill the disk.
        tensors = ranks.together(prepare, explain)
        write = partial(write_shards, staging, ranks.rank, shards, save_id, staged)
        shard_entries = ranks.gather(ranks.together(write, explain))
        parts = {file_name(r): entry for r, entry in enumerate(shard_entries) if entry}
        files = {name: file_entry(entry) for name, entry in parts.items()}

        def complete() -> None:
            if ranks.is_main:
                norms = [norms for *_, norms in parts.values()]
                entries = with_norms(tensors, norms, _norms_before(root))
                publish_manifest(staging, root, Manifest(step, save_id, entries, files, state))

        ranks.together(complete, explain)
    except BaseException:
        if ranks.is_main:
            discard(staging)
        raise
    if ranks.is_main:
        prune(root, keep_last=keep_last, keep_every=keep_every, since=wrong_since())
    return root / step_name(step)


def _norms_before(root: Path) -> Mapping[str, float | None]:
    """Return norms in the checkpoint that `latest` names, or before its weights jumped; {} if unreadable."""
    try:
        tensors = read_manifest_head(root / (latest_name(root) or "")).tensors
    except (UserError, OSError):
        return {}
    jumped = largest_jump(tensors) is not None
    return {name: entry.norm_before if jumped else entry.norm for name, entry in tensors.items()}


def file_entry(shard_entry: JSON) -> FileEntry:
    size, digest, blocks, _ = shard_entry
    return FileEntry(size, digest, tuple(blocks))


def stored_tensors(shards: Mapping[str, TensorShard]) -> dict[str, Tensor]:
    """Return the tensors of a rank's shards that hold an element; others are not written."""
    return {name: shard.tensor for name, shard in shards.items() if shard.tensor.numel()}


def write_shards(
    staging: Path,
    rank: int,
    shards: Mapping[str, TensorShard],
    save_id: str,
    staged: StagedFile | None = None,
) -> list[JSON] | None:
    """Write this rank's file; return [bytes, digest, block digests, norms], None without any element."""
    tensors, path = stored_tensors(shards), staging / file_name(rank)
    if not tensors:
        return None
    entry = staged.write(path) if staged else write_shard_file(path, tensors, save_id)
    saved = (staged.tensors if staged else tensors).items()
    norms = {name: norm(x) for name, x in saved if x.dtype.is_floating_point}
    return [entry.bytes, entry.digest, entry.blocks, norms]


def publish_manifest(staging: Path, root: Path, manifest: Manifest) -> None:
    """Add the manifest to a directory of shards, and make it the latest checkpoint of `root`.

    Raises NotFiniteError for a tensor that is not finite.
    """
    norms = [(name, entry.norm) for name, entry in manifest.tensors.items() if entry.norm is not None]
    if not_finite := [name for name, norm in norms if math.isnan(norm)]:
        name = min(not_finite, key=lambda name: not name.startswith("model."))  # weights first
        noun = "weights" if name.startswith("model.") else "optimizer state"
        raise NotFiniteError(
            f"step {manifest.step}: not saved: {noun} not finite: {name}; no checkpoint was replaced or "
            "deleted"
        )
    write_manifest(staging, manifest)
    if jump := largest_jump(manifest.tensors):
        log.warning(
            "step %d: the norm of %s is %.3g times what it was: too high a learning rate, or bad memory? No "
            "good checkpoint is deleted for this one",
            *(manifest.step, *jump),
        )
    set_newer_aside(root, manifest)
    publish(staging, root, manifest)


def _save_explainer(root: Path, rank: int) -> Callable[[Exception], UserError]:
    """Return a function that converts an error of a save to one that names the previous checkpoint."""
    previous = None
    with suppress(CheckpointError):  # an unreadable folder holds no intact checkpoint
        previous = next(map(step_directory_name, candidates(root)), None)

    def explain(error: Exception) -> UserError:
        path, cause, number = root, f"{type(error).__name__}: {error}", 0
        if isinstance(error, OSError) and error.errno:
            path, cause, number = error.filename or root, str(error.strerror), error.errno
        remedy = REMEDIES.get(number, "Fix it, or set out=… to another directory")
        exists = previous and os.path.isdir(root / previous)  # unlike Path.is_dir, never raises
        note = f"the previous checkpoint {previous} is intact" if exists else "there is no earlier checkpoint"
        return CheckpointError(f"{path}: could not be saved (rank {rank}): {cause}. {remedy}; {note}")

    return explain


def load_checkpoint(
    path: Path,
    shards: Mapping[str, TensorShard],
    *,
    ranks: Ranks = ONE_RANK,
    allow_extra: Callable[[str], bool] | None = None,
    cast: bool = False,
    config: Mapping[str, JSON] | None = None,
) -> Manifest:
    """Fill the tensors of `shards` in place from a checkpoint directory written at any layout.

    Collective over `ranks`. Size, save id and header of every file, names, shapes, dtypes and coverage are
    checked before any tensor changes. Every byte is compared with its digest: used blocks on the way into the
    tensors, the other blocks of each file by one rank.

    A tensor in the checkpoint that no rank requests is rejected unless `allow_extra(name)`; a requested one
    that is missing always. `cast` converts between floating dtypes. `config` is this run's, for messages.

    Raises on every rank alike: UserError if the checkpoint is of another model or precision, CorruptFileError
    if a file is damaged, CheckpointError if one cannot be read, LostPeer if a rank does not take part. A
    damaged block, a failing disk or a cast that overflows leaves some tensors filled.
    """
    path = Path(path)

    def explain(error: Exception) -> UserError:
        message = f"{path}: could not be loaded (rank {ranks.rank}): {type(error).__name__}: {error}"
        if isinstance(error, OSError):
            location = error.filename or path
            message = f"{location}: cannot be read (rank {ranks.rank}): {error.strerror}. {RESTORE}"
        return CheckpointError(message)

    manifest = ranks.together(lambda: read_manifest(path), explain)
    if len(set(ranks.all_gather(manifest.digest))) > 1:
        raise CheckpointError(f"{path}: ranks see different checkpoints there. Load it from a shared disk")
    is_requested = ranks.any_of([name in shards for name in manifest.tensors])
    extra = [name for name, requested in zip(manifest.tensors, is_requested, strict=True) if not requested]
    unexpected = [name for name in extra if not (allow_extra and allow_extra(name))]

    def plan() -> dict[str, list[Reading]]:
        _check_fit(path, manifest, shards, unexpected, cast, config or {})
        return plan_reading(manifest, shards)

    readings = ranks.together(plan, explain)
    share = sorted(manifest.files)[ranks.rank :: ranks.world_size]
    with Reader(path, manifest) as reader, torch.no_grad():

        def check() -> None:
            for file in sorted({*share, *readings}):
                reader.check(file, readings.get(file, ()))

        def fill() -> None:
            for file in sorted({*share, *readings}):
                reader.copy(file, readings.get(file, ()))
                if file in share:
                    reader.check_all(file)

        ranks.together(check, explain)
        ranks.together(fill, explain)
    return manifest


def _check_fit(
    path: Path,
    manifest: Manifest,
    shards: Mapping[str, TensorShard],
    unexpected: list[str],
    cast: bool,
    config: Mapping[str, JSON],
) -> None:
    problems, dtypes = [f"{name} is in it, not here" for name in unexpected], list[str]()
    for name, shard in shards.items():
        entry, dtype = manifest.tensors.get(name), shard.tensor.dtype
        if entry is None:
            problems.append(f"{name} is not in it")
        elif entry.shape != tuple(shard.global_shape):
            problems.append(f"{name} has shape {list(shard.global_shape)} here, {list(entry.shape)} there")
        elif entry.dtype != dtype and not (
            cast and dtype.is_floating_point and entry.dtype.is_floating_point
        ):
            dtypes.append(f"{name} is {dtype} here, {entry.dtype} there")
    difference, remedy = "another model", "Set model=… as it was trained, or ckpt=… to another checkpoint"
    if not problems:
        problems, difference, remedy = dtypes, "another precision", "Set precision=… as it was trained"
    if problems:
        more = f"; and {len(problems) - LISTED} more" if problems[LISTED:] else ""
        model, saved = config.get("model"), manifest.state.get("config")
        saved_model = saved.get("model") if isinstance(saved, dict) else None
        settings = ""
        if isinstance(model, Mapping) and isinstance(saved_model, Mapping):
            keys = [key for key in model if key in saved_model and model[key] != saved_model[key]]
            settings = "".join(
                f"; model.{key} is {model[key]} here, {saved_model[key]} there" for key in keys
            )
        listed = "; ".join(problems[:LISTED])
        raise UserError(f"{path}: checkpoint of {difference}: {listed}{more}{settings}. {remedy}")
