"""The folder of checkpoints: publication, `latest`, and the choice of the one to load.

Names that begin with a dot are work in progress: `.saving-…` an unfinished save, `.replaced-step-N` the old
step-N while a new one takes its place, `.trash-…` a checkpoint being deleted. The next save clears them up.
"""

import errno
import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from mlm.checkpoint.native.format import (
    MANIFEST,
    CheckpointError,
    Manifest,
    read_manifest,
    read_manifest_head,
    regular_size,
)
from mlm.checkpoint.native.run_state import Lineage, Save
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import fsync_directory
from mlm.util.ownership import CHECKPOINTS as CHECKPOINTS
from mlm.util.ownership import file_type_name, owner_of

log = logging.getLogger(__name__)

LATEST = "latest"
BEST = "best"
"""Folder of a run with the weights that validated best; it holds its own checkpoints and tokenizer."""
SAVING, REPLACED, TRASH, NEW_LATEST = ".saving-", ".replaced-", ".trash-", ".latest-"
STEP_NAME = re.compile(r"step-(\d{8,18})")
ASIDE = re.compile(r"aside-step-(\d{8,18})(-\d+)?")
"""A checkpoint that a roll-back, or the training after it, renamed: nothing loads, counts or deletes it."""
LEFT = re.compile(r"\.(?:saving|replaced|trash|latest)-(?:\w+-)?step-\d{8,18}(?:-[\w-]+)?")
"""Leftovers of killed saves and deletions."""
OURS = re.compile(r"manifest\.json|rank-\d{5,}\.safetensors|\.nfs\w+|\..+\.\d+\.partial")
"""Files of a checkpoint, and temporary files of a file system or `write_atomic`."""


def step_name(step: int) -> str:
    assert step >= 0
    return f"step-{step:08d}"


def checkpoints(root: Path) -> dict[int, Path]:
    """Return the directory of each step in `root`, oldest first, whether whole or not.

    A checkpoint that a killed save had moved aside to replace it counts. Raises CheckpointError if `root`
    cannot be read.
    """
    paths: dict[int, Path] = {}
    try:
        for path in sorted(root.iterdir()) if root.is_dir() else []:  # "." sorts before "s": step-N wins
            if (match := STEP_NAME.fullmatch(path.name.removeprefix(REPLACED))) and path.is_dir():
                paths[int(match[1])] = path
    except OSError as e:
        raise CheckpointError(f"{e.filename}: cannot be read: {e.strerror}. Make it readable") from e
    return dict(sorted(paths.items()))


def read_pointer(root: Path) -> tuple[str | None, str | None]:
    """Return the directory name in the file `latest`, and why the file is not valid, if it is not.

    The name is None without a valid file. Only the first line counts.
    """
    path = root / LATEST
    try:
        if not os.path.lexists(path):
            return None, None
        if not path.is_file():  # a pipe would block
            return None, f"is {file_type_name(path)}"
        with open(path, "rb") as f:
            name = f.read(1 << 10).decode("ascii", "replace").strip().partition("\n")[0]
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"
    return (name, None) if STEP_NAME.fullmatch(name) else (None, "names no checkpoint (step-…)")


def pointer_problem(root: Path) -> str | None:
    """Return why `latest` leads to no checkpoint; None if it does, or is absent. Raises CheckpointError."""
    name, problem = read_pointer(root)
    if name is not None and step_of(Path(name)) not in checkpoints(root):
        problem = f"names {name}, which is gone"
    return problem and f"{root / LATEST} {problem}"


def latest_name(root: Path) -> str | None:
    """Return the directory name in the file `latest`; None if the file is missing or not valid."""
    return read_pointer(root)[0]


def latest_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint to continue from; None without any checkpoint.

    It is the first of `candidates` that is whole by names and sizes (digests are checked at loading). A
    warning reports if it is not the one that `latest` names. Raises CorruptFileError if there are checkpoints
    but no candidate is whole: starting afresh would hide the loss.
    """
    problem = pointer_problem(root)
    problems = [problem] if problem else []
    for path in candidates(root):
        if problem := checkpoint_problem(path):
            problems.append(problem)
            continue
        if problems:
            log.warning("%s; continuing from the newest whole checkpoint, %s", problems[0], path)
        return path
    present = checkpoints(root)
    if not present:
        return None
    latest, newest, remedy = latest_name(root), max(present), ""
    if latest is not None and newest > step_of(Path(latest)):
        remedy = f". To continue from {step_name(newest)}, write its name into {root / LATEST}"
    raise CorruptFileError(f"{root}: no checkpoint is whole. {problems[0]}{remedy}")


def step_directory_name(path: Path) -> str:
    """Return the step-… name of a checkpoint, moved aside or not."""
    return path.name.removeprefix(REPLACED)


def step_of(path: Path) -> int:
    return int(step_directory_name(path).removeprefix("step-"))


def candidates(root: Path) -> list[Path]:
    """Return the checkpoints to continue from, whole or not: `latest`, then older ones, the newest first.

    Those newer than `latest` belong to a past that the user rolled back; without a valid `latest`, all count.
    Raises CheckpointError if `root` cannot be read.
    """
    paths, name = list(checkpoints(root).values()), latest_name(root)
    newest = step_of(Path(name)) if name else max(map(step_of, paths), default=0)
    return [path for path in reversed(paths) if step_of(path) <= newest]


def descendants_set_aside(root: Path, head: Path) -> dict[int, Path]:
    """Return checkpoints set aside that descend from `head`, by step. Raises OSError."""
    try:
        manifest = read_manifest_head(head)
    except UserError:
        return {}
    aside = {int(match[1]): path for path in sorted(root.iterdir()) if (match := ASIDE.fullmatch(path.name))}
    return {step: path for step, path in sorted(aside.items()) if manifest.save in ancestors_of(path)}


def find_saves(root: Path, saves: Sequence[Save]) -> list[Path]:
    """Return the remaining checkpoints of these saves, in order, set aside or not. Raises CheckpointError."""
    by_save = saves_in(root)
    return [by_save[save] for save in saves if save in by_save]


def saves_in(root: Path) -> dict[Save, Path]:
    """Return the checkpoints in `root` by save, set aside or not. Raises CheckpointError."""
    paths, by_save = list(checkpoints(root).values()), dict[Save, Path]()
    paths += [path for path in root.iterdir() if ASIDE.fullmatch(path.name)] if root.is_dir() else []
    for path in paths:
        with suppress(UserError, OSError):
            by_save.setdefault(read_manifest_head(path).save, path)
    return by_save


def ancestors_of(path: Path) -> tuple[Save, ...]:
    """Return the saves that a checkpoint descends from; () if it cannot be read."""
    try:
        return Lineage.of(read_manifest_head(path).state).ancestors
    except (UserError, OSError):
        return ()


def set_newer_aside(root: Path, manifest: Manifest) -> None:
    """Set aside checkpoints newer than the parent of a new one: its run was rolled back before them.

    A checkpoint of the same step stays, to be replaced. Raises OSError and CheckpointError.
    """
    if not (ancestors := Lineage.of(manifest.state).ancestors):
        return
    for step, path in checkpoints(root).items():
        if step > ancestors[-1].step and step != manifest.step:
            os.rename(path, free_name(root, step))


def free_name(root: Path, step: int) -> Path:
    """Return a free name for a checkpoint to set aside; another one may have been of this step."""
    path, number = root / f"aside-{step_name(step)}", 1
    while os.path.lexists(path):
        number += 1
        path = root / f"aside-{step_name(step)}-{number}"
    return path


def checkpoint_problem(directory: Path) -> str | None:
    """Return why a checkpoint is not whole by names and sizes; None if it is. No shard is read."""
    try:
        manifest = read_manifest_head(directory)
        if step_directory_name(directory) != step_name(manifest.step) and STEP_NAME.fullmatch(
            step_directory_name(directory)
        ):
            return f"{directory / MANIFEST}: of step {manifest.step}, copied here from another checkpoint"
        for name, entry in manifest.files.items():
            if (size := regular_size(directory / name)) != entry.bytes:
                return f"{directory / name}: {size} bytes, the manifest says {entry.bytes}"
    except UserError as e:
        return str(e)
    except OSError as e:
        return f"{e.filename}: cannot be read: {e.strerror}"
    return None


def resolve(path: str | Path, setting: str = "ckpt") -> Path:
    """Return the checkpoint directory that a user means by `ckpt=path`; `setting` is the key for messages.

    Accepts a step-… directory, a folder of them, the `latest` file in it, or a run directory: its best
    checkpoint if it keeps one, as finetuning does, else its latest. Raises UserError if there is no
    checkpoint, CorruptFileError as `latest_checkpoint` does.
    """
    best = latest_checkpoint(Path(path) / BEST / CHECKPOINTS)
    if best is not None:
        return best
    folder, is_checkpoint = locate(path, setting)
    return folder if is_checkpoint else latest_checkpoint(folder) or _refuse_empty(path, setting)


def best_note(path: str | Path, checkpoint: Path) -> str | None:
    """Return the line for the user where `resolve(path)` is the best checkpoint that a run has kept."""
    if checkpoint.parent != Path(path) / BEST / CHECKPOINTS:
        return None
    return f"{path} keeps its best checkpoint, which is taken: {checkpoint}; name a step-… for another"


def locate(path: str | Path, setting: str = "ckpt") -> tuple[Path, bool]:
    """Return the path that `resolve` accepts as a checkpoint and True, or as a folder of them and False.

    Raises UserError if there is no checkpoint; whether it is whole is not checked.
    """
    location = Path(path)
    try:
        if location.is_file() and location.name in (LATEST, MANIFEST):
            location = location.parent
        if not location.is_dir():
            raise UserError(
                f"{setting}={location}: no such directory. Set {setting}=… to a step-… or run directory"
            )
        if (location / MANIFEST).exists() or STEP_NAME.fullmatch(location.name):
            return location, True
        for folder in (location / CHECKPOINTS, location):
            if checkpoints(folder):
                return folder, False
    except OSError as e:
        raise CheckpointError(f"{setting}={path}: cannot be read: {e.strerror}. Make it readable") from e
    _refuse_empty(path, setting)


def _refuse_empty(path: str | Path, setting: str) -> NoReturn:
    raise UserError(
        f"{setting}={path}: holds no checkpoint (step-…). Set {setting}=… to a step-… or run directory"
    )


def open_staging(root: Path, step: int, save_id: str) -> Path:
    """Make a directory to write a checkpoint into; delete leftovers of killed saves. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    fsync_directory(root.parent)
    staging = staging_path(root, step, save_id)
    clear_up(root)
    staging.mkdir()
    return staging


def leftovers(root: Path) -> list[Path]:
    """Return the leftovers of killed saves that `clear_up` deletes, sorted by name. Raises OSError."""
    return sorted(path for path in root.iterdir() if _is_left(path) and not _is_moved_aside(path))


def _is_left(path: Path) -> bool:
    """True for a leftover of a killed save, by its name and content."""
    if not LEFT.fullmatch(path.name) or path.is_symlink():
        return False
    return path.is_file() if path.name.startswith(NEW_LATEST) else path.is_dir() and foreign_in(path) is None


def _is_moved_aside(path: Path) -> bool:
    """True for an old step-N that no new one has replaced yet."""
    return path.name.startswith(REPLACED) and not path.with_name(step_directory_name(path)).exists()


def foreign_in(directory: Path) -> str | None:
    """Return the first entry of a checkpoint directory that mlm did not write, else None. Raises OSError.

    mlm writes no links, no folders, and no files but the manifest and shards.
    """
    if directory.is_symlink():
        return "a link"
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if not (OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)):
            return entry.name
    return None


def clear_up(root: Path) -> None:
    """Finish or delete the leftovers of killed saves. Raises OSError."""
    for path in filter(_is_left, list(root.iterdir())):
        if _is_moved_aside(path):
            os.rename(path, path.with_name(step_directory_name(path)))
        elif path.is_dir():
            discard(path)
        else:
            path.unlink()


def staging_path(root: Path, step: int, save_id: str) -> Path:
    """Return the directory of a save before it is published. Unique, so two runs never share one."""
    return root / f"{SAVING}{step_name(step)}-{save_id[:12]}"


def publish(staging: Path, root: Path, manifest: Manifest) -> None:
    """Give a fully written directory its name and point `latest` at it. Raises OSError.

    At every instant either the old checkpoint or the new one is found by `latest_checkpoint`.
    """
    name = step_name(manifest.step)
    final, replaced = root / name, root / f"{REPLACED}{name}"
    pointer = root / f"{NEW_LATEST}{staging.name.removeprefix(SAVING)}"
    try:
        _write_pointer(pointer, name)  # first: a full disk shows before anything is renamed
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
    """Point `latest` at a published step. Raises OSError, and as `read_manifest` does."""
    pointer = root / f"{NEW_LATEST}{step_name(step)}"
    read_manifest(root / step_name(step))
    try:
        _write_pointer(pointer, step_name(step))
        os.replace(pointer, root / LATEST)
    finally:
        pointer.unlink(missing_ok=True)
    fsync_directory(root)


def _write_pointer(pointer: Path, name: str) -> None:
    with open(pointer, "xb") as f:
        f.write(f"{name}\n".encode())
        f.flush()
        os.fsync(f.fileno())


def discard(path: Path) -> bool:
    """Delete the directory of a checkpoint or save unless it holds foreign files; return True if deleted.

    It is renamed first, so that a half-deleted one is never taken for a checkpoint. Never raises: a warning
    gives the reason.
    """
    trash = path
    try:
        if (foreign := foreign_in(path)) is not None:
            log.warning("%s: not deleted: holds %s, which mlm did not write", path, foreign)
            return False
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            log.warning("%s: not deleted: it belongs to %s, and this user may not", path, owner_of(path))
            return False
        if not path.name.startswith(TRASH):
            trash = path.with_name(f"{TRASH}{path.name.lstrip('.')}-{os.urandom(4).hex()}")
            os.rename(path, trash)
        shutil.rmtree(trash)
    except FileNotFoundError:
        pass
    except OSError as e:
        log.warning("%s: could not be deleted: %s", path, e.strerror)
        return False
    return True
