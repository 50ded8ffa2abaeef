"""The folder of checkpoints: publication, `latest`, retention, and finding the one to load.

Names that begin with a dot are work in progress: `.saving-…` a save that did not finish, `.replaced-step-N`
the old step-N while a new one takes its place, `.trash-…` one being deleted. The next save clears them up.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from mlm.checkpoint.format import MANIFEST, CheckpointError, read_manifest, regular_size
from mlm.config.errors import CorruptFileError, UserError
from mlm.files import fsync_directory

log = logging.getLogger(__name__)

LATEST = "latest"
STEP_NAME = re.compile(r"step-(\d{8,18})")
SAVING, REPLACED, TRASH, NEW_LATEST = ".saving-", ".replaced-", ".trash-", ".latest-"


def step_name(step: int) -> str:
    """Name of the directory of a step: step-00001000."""
    assert step >= 0
    return f"step-{step:08d}"


def checkpoints(root: Path) -> dict[int, Path]:
    """Directory of each step in `root`, oldest first, whether whole or not.

    A step that a kill caught between being moved aside and being replaced is found where it was moved to.
    Raises CheckpointError when `root` cannot be read.
    """
    found: dict[int, Path] = {}
    try:
        for path in sorted(root.iterdir()) if root.is_dir() else []:  # "." sorts before "s": step-N wins
            if (match := STEP_NAME.fullmatch(path.name.removeprefix(REPLACED))) and path.is_dir():
                found[int(match[1])] = path
    except OSError as e:
        raise CheckpointError(f"{e.filename}: cannot be read: {e.strerror}. Make it readable") from e
    return dict(sorted(found.items()))


def named_latest(root: Path) -> str | None:
    """The directory name that the file `latest` holds; None when it is missing or holds something else."""
    try:
        with open(root / LATEST, "rb") as f:
            name = f.read(100).decode(errors="replace").strip()
    except OSError:
        return None
    return name if STEP_NAME.fullmatch(name) else None


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint to continue from; None when there is no checkpoint at all.

    That is the one `latest` names. If it is gone or not whole (manifest unreadable, a file missing or of
    another size; digests are checked at loading), then the newest whole one, with a warning that says so.
    Raises CorruptFileError when there are checkpoints but none is whole: starting afresh would be no remedy.
    """
    found = checkpoints(root)
    named = named_latest(root)
    # A stable sort: newest last, but the named one after it.
    order = sorted(found.values(), key=lambda path: path.name.removeprefix(REPLACED) == named)
    faults = []
    while order:
        path = order.pop()
        if fault := _fault(path):
            faults.append(fault)
            continue
        if faults or (named and path.name.removeprefix(REPLACED) != named):
            gone = faults[0] if faults else f"{root / LATEST} names {named}, which is gone"
            log.warning("%s; continuing from the newest whole checkpoint, %s", gone, path)
        return path
    if faults:
        raise CorruptFileError(f"{root}: no checkpoint is whole. {faults[0]}")
    return None


def _fault(directory: Path) -> str | None:
    """Why a checkpoint is not whole, as far as names and sizes tell."""
    try:
        for name, entry in read_manifest(directory).files.items():
            if (size := regular_size(directory / name)) != entry.bytes:
                return f"{directory / name}: {size} bytes, the manifest says {entry.bytes}"
    except (UserError, OSError) as e:
        return str(e)
    return None


def resolve(path: str | Path) -> Path:
    """The checkpoint directory that a user means by `ckpt=path`.

    Accepts a step-… directory, a folder of them, the `latest` file in it, or a run directory (the folder
    itself or its `checkpoints`). Raises UserError when there is none, CorruptFileError as
    `latest_checkpoint` does.
    """
    try:
        found = _resolve(Path(path))
    except OSError as e:
        raise CheckpointError(f"ckpt={path}: cannot be read: {e.strerror}. Make it readable") from e
    if found is None:
        raise UserError(f"ckpt={path}: holds no checkpoint (step-…). Set ckpt=… to a step-… or run directory")
    return found


def _resolve(given: Path) -> Path | None:
    if given.is_file() and given.name in (LATEST, MANIFEST):
        given = given.parent
    if not given.is_dir():
        raise UserError(f"ckpt={given}: no such directory. Set ckpt=… to a step-… or run directory")
    if (given / MANIFEST).exists() or STEP_NAME.fullmatch(given.name):
        return given
    return latest_checkpoint(given / "checkpoints") or latest_checkpoint(given)


def open_staging(root: Path, step: int, save_id: str) -> Path:
    """A fresh directory to write a checkpoint into; clears up after killed saves. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    fsync_directory(root.parent)
    for path in list(root.iterdir()):
        if path.name.startswith(REPLACED) and not (root / path.name.removeprefix(REPLACED)).exists():
            os.rename(path, root / path.name.removeprefix(REPLACED))
        elif path.name.startswith((SAVING, REPLACED, TRASH)):
            discard(path)
        elif path.name.startswith(NEW_LATEST):
            path.unlink()
    staging = staging_path(root, step, save_id)
    staging.mkdir()
    return staging


def staging_path(root: Path, step: int, save_id: str) -> Path:
    """Where a save is written before it is published. Unique, so two runs never share one."""
    return root / f"{SAVING}{step_name(step)}-{save_id[:12]}"


def publish(staging: Path, root: Path, step: int) -> None:
    """Give a fully written directory its name and point `latest` at it. Raises OSError.

    At every instant either the old checkpoint or the new one is found by `latest_checkpoint`.
    """
    final, replaced = root / step_name(step), root / f"{REPLACED}{step_name(step)}"
    pointer = root / f"{NEW_LATEST}{staging.name.removeprefix(SAVING)}"
    try:
        with open(pointer, "xb") as f:  # first: a full disk shows before anything is renamed
            f.write(f"{final.name}\n".encode())
            f.flush()
            os.fsync(f.fileno())
        fsync_directory(staging)
        if final.exists():
            os.rename(final, replaced)
        try:
            os.rename(staging, final)
        except OSError:
            if replaced.exists():
                os.rename(replaced, final)
            raise
        fsync_directory(root)
        os.replace(pointer, root / LATEST)
        fsync_directory(root)
    finally:
        pointer.unlink(missing_ok=True)
    discard(replaced)


def prune(root: Path, step: int, *, keep_last: int, keep_every: int) -> None:
    """Delete old checkpoints after `step` was saved. Never raises: a leftover is no failed save.

    Kept: the `keep_last` newest up to `step`, multiples of `keep_every` (0: none), the one `latest` names,
    and steps after `step`, which belong to a run that was rolled back: deleting those is the user's call.
    """
    try:
        upto = [(s, path) for s, path in checkpoints(root).items() if s <= step]
    except CheckpointError as e:
        log.warning("old checkpoints were not pruned: %s", e)
        return
    for s, path in upto[: max(0, len(upto) - max(keep_last, 1))]:
        if not (keep_every and s % keep_every == 0) and path.name != named_latest(root):
            discard(path)


def discard(path: Path) -> None:
    """Delete a directory; it first loses its name, so that half of it is never taken for a checkpoint."""
    trash = path if path.name.startswith(TRASH) else path.with_name(f"{TRASH}{path.name.lstrip('.')}")
    try:
        if trash != path:
            if trash.exists():
                shutil.rmtree(trash)
            os.rename(path, trash)
        if trash.is_symlink():
            trash.unlink()
        else:
            shutil.rmtree(trash)
    except FileNotFoundError:
        pass
    except OSError as e:
        log.warning("%s: could not be deleted: %s", path, e.strerror)
