"""The folder of checkpoints: publication, `latest`, retention, and finding the one to load.

Names that begin with a dot are work in progress: `.saving-…` a save that did not finish, `.replaced-step-N`
the old step-N while a new one takes its place, `.trash-…` one being deleted. The next save clears them up.
"""

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mlm.checkpoint.format import MANIFEST, CheckpointError, read_manifest, regular_size
from mlm.config.errors import CorruptFileError, UserError
from mlm.files import fsync_directory

log = logging.getLogger(__name__)

LATEST = "latest"
STEP_NAME = re.compile(r"step-(\d{8,18})")
SAVING, REPLACED, TRASH, NEW_LATEST = ".saving-", ".replaced-", ".trash-", ".latest-"
_STEP = r"step-\d{8,18}"
LEFT = re.compile(rf"\.(saving-{_STEP}-[\w-]+|replaced-{_STEP}|trash-(saving-|replaced-)?{_STEP}(-[\w-]+)?)")
"""Folders that killed saves and deletions leave."""
LEFT_POINTER = re.compile(rf"\.latest-{_STEP}(-[\w-]+)?")
SHARD = re.compile(r"rank-\d{5,}\.safetensors(\.done)?")
PARTIAL = re.compile(r"\.nfs\w+|\..+\.\d+\.partial")
"""Files that a file system or `write_atomic` leaves for a while."""


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
        if not (root / LATEST).is_file():  # a pipe would block
            return None
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
        if fault := fault_of(path):
            faults.append(fault)
            continue
        if faults or (named and path.name.removeprefix(REPLACED) != named):
            gone = faults[0] if faults else f"{root / LATEST} names {named}, which is gone"
            log.warning("%s; continuing from the newest whole checkpoint, %s", gone, path)
        return path
    if faults:
        raise CorruptFileError(f"{root}: no checkpoint is whole. {faults[0]}")
    return None


def fault_of(directory: Path) -> str | None:
    """Why a checkpoint is not whole, as far as names and sizes tell: no file but the manifest is read."""
    try:
        for name, entry in read_manifest(directory).files.items():
            if (size := regular_size(directory / name)) != entry.bytes:
                return f"{directory / name}: {size} bytes, the manifest says {entry.bytes}"
    except (UserError, OSError) as e:
        return str(e)
    return None


def resolve(path: str | Path, setting: str = "ckpt") -> Path:
    """The checkpoint directory that a user means by `ckpt=path`; `setting` is the key for messages.

    Accepts a step-… directory, a folder of them, the `latest` file in it, or a run directory (the folder
    itself or its `checkpoints`). Raises UserError when there is none, CorruptFileError as
    `latest_checkpoint` does.
    """
    place, alone = locate(path, setting)
    return place if alone else latest_checkpoint(place) or _refuse_empty(path, setting)


def locate(path: str | Path, setting: str = "ckpt") -> tuple[Path, bool]:
    """What a user means of what `resolve` accepts: a checkpoint and True, or a folder of them and False.

    Raises UserError when there is none. Whether any is whole is not asked.
    """
    given = Path(path)
    try:
        if given.is_file() and given.name in (LATEST, MANIFEST):
            given = given.parent
        if not given.is_dir():
            raise UserError(
                f"{setting}={given}: no such directory. Set {setting}=… to a step-… or run directory"
            )
        if (given / MANIFEST).exists() or STEP_NAME.fullmatch(given.name):
            return given, True
        for folder in (given / "checkpoints", given):
            if checkpoints(folder):
                return folder, False
    except OSError as e:
        raise CheckpointError(f"{setting}={path}: cannot be read: {e.strerror}. Make it readable") from e
    _refuse_empty(path, setting)


def _refuse_empty(path: str | Path, setting: str) -> NoReturn:
    raise UserError(
        f"{setting}={path}: holds no checkpoint (step-…). Set {setting}=… to a step-… or run directory"
    )


def open_staging(root: Path, step: int, save_id: str, *, keep: bool = False) -> Path:
    """A fresh directory to write a checkpoint into; clears up after killed saves. Raises OSError.

    With `keep` a directory that an earlier try with the same save id left is handed out as it is.
    """
    root.mkdir(parents=True, exist_ok=True)
    fsync_directory(root.parent)
    staging = staging_path(root, step, save_id)
    clear_up(root, keep=staging if keep else None)
    staging.mkdir(exist_ok=keep)
    return staging


def leftovers(root: Path) -> list[Path]:
    """What killed saves left and `clear_up` deletes, sorted by name. Raises OSError."""
    return sorted(path for path in root.iterdir() if _is_left(path) and not _is_moved_aside(path))


def _is_left(path: Path) -> bool:
    """True for what a killed save left: by its name, and by what it holds."""
    if LEFT_POINTER.fullmatch(path.name):
        return path.is_file() and not path.is_symlink()
    return LEFT.fullmatch(path.name) is not None and path.is_dir() and foreign_in(path) is None


def _is_moved_aside(path: Path) -> bool:
    """True for the old step-N while no new one has taken its place."""
    name = path.name.removeprefix(REPLACED)
    return path.name.startswith(REPLACED) and not path.with_name(name).exists()


def foreign_in(directory: Path) -> str | None:
    """What in the directory of a checkpoint mlm did not write, None if all is ours. Raises OSError.

    A link is not ours, nor is a folder or a file of another name than the manifest or those that it lists.
    """
    if directory.is_symlink():
        return "a link"
    try:
        listed = set(read_manifest(directory).files)
    except UserError:
        listed = set()
    found = {entry.name: entry.is_file(follow_symlinks=False) for entry in os.scandir(directory)}
    if MANIFEST in found and not listed and not any(map(SHARD.fullmatch, found)):
        return MANIFEST if regular_size(directory / MANIFEST) else None
    for name, is_file in sorted(found.items()):
        ours = name == MANIFEST or name in listed or SHARD.fullmatch(name) or PARTIAL.fullmatch(name)
        if not (ours and is_file):
            return name
    return None


def clear_up(root: Path, *, keep: Path | None = None) -> None:
    """Finish or delete what killed saves left, but for the directory `keep`. Raises OSError."""
    for path in list(root.iterdir()):
        if path == keep or not _is_left(path):
            continue
        if _is_moved_aside(path):
            os.rename(path, root / path.name.removeprefix(REPLACED))
        elif path.is_dir():
            discard(path)
        else:
            path.unlink()


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
        _write_pointer(pointer, step)  # first: a full disk shows before anything is renamed
        fsync_directory(staging)
        if os.path.lexists(final):
            if (foreign := foreign_in(final)) is not None:
                raise OSError(errno.EEXIST, f"holds {foreign}, which mlm did not write", str(final))
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


def point_latest(root: Path, step: int) -> None:
    """Point `latest` at a step that is published. Raises OSError."""
    pointer = root / f"{NEW_LATEST}{step_name(step)}"
    _write_pointer(pointer, step)
    os.replace(pointer, root / LATEST)
    fsync_directory(root)


def _write_pointer(pointer: Path, step: int) -> None:
    with open(pointer, "xb") as f:
        f.write(f"{step_name(step)}\n".encode())
        f.flush()
        os.fsync(f.fileno())


def prune(root: Path, step: int, *, keep_last: int, keep_every: int) -> None:
    """Delete old checkpoints after `step` was saved. Never raises: a leftover is no failed save.

    Steps after `step` are kept: they belong to a run that was rolled back, and deleting is the user's call.
    """
    try:
        old = outdated(root, keep_last=keep_last, keep_every=keep_every, upto=step)
    except CheckpointError as e:
        log.warning("old checkpoints were not pruned: %s", e)
        return
    for path in old:
        discard(path)


def outdated(
    root: Path,
    *,
    keep_last: int,
    keep_every: int,
    upto: int | None = None,
    fault: Callable[[Path], str | None] = fault_of,
) -> list[Path]:
    """The checkpoints up to step `upto` (None: all) that retention gives up, oldest first.

    Kept: the `keep_last` newest whole ones, at least one, and whatever is newer; multiples of `keep_every`
    (0: none); the one `latest` names. A damaged one, of which `fault(directory)` says why, never counts as
    kept: it goes when `keep_last` whole ones are newer, so where none is whole nothing goes. `fault` is asked
    from the newest on, as long as it matters. Raises CheckpointError when `root` cannot be read.
    """
    named, whole, old = named_latest(root), 0, []
    for step, path in reversed(checkpoints(root).items()):
        if upto is not None and step > upto:
            continue
        if whole < max(keep_last, 1):
            whole += fault(path) is None
        elif not (keep_every and step % keep_every == 0) and path.name.removeprefix(REPLACED) != named:
            old += [path] if _is_ours(path) else []
    return old[::-1]


def _is_ours(path: Path) -> bool:
    """True if nothing in a checkpoint's directory is the user's."""
    try:
        return foreign_in(path) is None
    except OSError:
        return False


def discard(path: Path) -> bool:
    """Delete the directory of a checkpoint, or of a save, unless something in it is not ours.

    It first loses its name, so that half of it is never taken for a checkpoint. Returns True if all of it is
    gone; never raises: a warning says why not.
    """
    trash = path if path.name.startswith(TRASH) else path.with_name(f"{TRASH}{path.name.lstrip('.')}")
    try:
        for place in {path, trash}:
            if os.path.lexists(place) and (foreign := foreign_in(place)) is not None:
                log.warning("%s: not deleted: holds %s, which mlm did not write", place, foreign)
                return False
        if trash != path:
            if trash.exists():
                shutil.rmtree(trash)
            os.rename(path, trash)
        shutil.rmtree(trash)
    except FileNotFoundError:
        pass
    except OSError as e:
        log.warning("%s: could not be deleted: %s", path, e.strerror)
        return False
    return True
