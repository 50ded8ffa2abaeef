"""`mlm ckpt rollback`: continue a run from an earlier checkpoint; newer ones are set aside."""

import logging
import os
import shlex
from functools import cache
from pathlib import Path

from mlm.checkpoint.commands.config import CkptRollbackConfig
from mlm.checkpoint.commands.verify import content_problem
from mlm.checkpoint.native.folders import (
    ancestors_of,
    checkpoints,
    clear_up,
    descendants_set_aside,
    free_name,
    latest_name,
    locate,
    point_latest,
    step_directory_name,
    step_name,
    step_of,
)
from mlm.checkpoint.native.format import CheckpointError, read_manifest_head
from mlm.checkpoint.native.retention import checkpoint_doubt, newest_good
from mlm.checkpoint.native.run_state import Save
from mlm.tracking.history import FILE_NAME, diverged_since
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import fsync_directory
from mlm.util.lock import single_writer
from mlm.util.terminal import console, one_line

log = logging.getLogger(__name__)

Moves = list[tuple[Path, Path]]
"""Paths of checkpoints before and after they were renamed."""


def run(config: CkptRollbackConfig) -> None:
    """Move `latest`, and print the way forward and back.

    Raises UserError when the folder is in use or has no such checkpoint, CorruptFileError when it is not
    whole, CheckpointError when something cannot be renamed.
    """
    root, alone = locate(config.ckpt)
    if alone:
        raise UserError(f"ckpt={config.ckpt}: is one checkpoint; set ckpt=… to its run directory")
    with single_writer(root, setting="ckpt"):
        try:
            before = latest_name(root)
            step = find_step(root, config)
            moves = move_latest(root, step)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or root}: {error.strerror}: make it writable, or free space there"
            ) from error
    show(config.ckpt, root / step_name(step), before, moves)


def find_step(root: Path, config: CkptRollbackConfig) -> int:
    """Return the step to move to: the one asked for, or the newest good one, every byte of it read.

    Raises UserError, CorruptFileError.
    """
    paths = reachable(root)
    if config.step is None:
        good = newest_good(root, diverged_since(root.parent / FILE_NAME), cache(warned_problem))
        if good is None:
            raise CorruptFileError(
                f"{root}: no checkpoint is good; name one with step=… (of {step_list(paths)})"
            )
        return step_of(good)
    if config.step not in paths:
        raise UserError(
            f"step={config.step}: no checkpoint to move to; set step=… to one of {step_list(paths)}"
        )
    if problem := content_problem(paths[config.step]):
        raise CorruptFileError(f"step={config.step}: {problem}; set step=… to another of {step_list(paths)}")
    return config.step


def warned_problem(path: Path) -> str | None:
    """`content_problem`, with a warning that the checkpoint is passed over."""
    if problem := content_problem(path):
        log.warning("%s; looking for an older one", problem)
    return problem


def reachable(root: Path) -> dict[int, Path]:
    """Checkpoints by step that `latest` can be moved to: those in their place, and its set aside descendants.

    Raises OSError, and CheckpointError when `root` cannot be read.
    """
    present, name = checkpoints(root), latest_name(root)
    head = next((path for path in present.values() if step_directory_name(path) == name), None)
    return dict(sorted({**(descendants_set_aside(root, head) if head else {}), **present}.items()))


def move_latest(root: Path, step: int) -> Moves:
    """Point `latest` at a reachable step, with its ancestors in their place and what is newer set aside.

    A kill at any instant leaves a `latest` that can be loaded; the same call then does the rest. Raises
    OSError and what reading the manifest of `step` raises.
    """
    clear_up(root)
    paths = reachable(root)
    past, restored, newer = ancestors_of(paths[step]), Moves(), Moves()
    for other, path in paths.items():
        in_place = path.name == step_name(other)
        if other > step and in_place:
            newer.append((path, free_name(root, other)))
        elif not in_place and (other == step or Save(other, read_manifest_head(path).save_id) in past):
            restored.append((path, root / step_name(other)))
    for before, after in restored:
        os.rename(before, after)
    point_latest(root, step)
    for before, after in newer:
        os.rename(before, after)
    fsync_directory(root)
    return restored + newer


def step_list(paths: dict[int, Path]) -> str:
    """Return steps, those set aside marked."""
    return ", ".join(
        f"{step}{'' if path.name == step_name(step) else ' (set aside)'}" for step, path in paths.items()
    )


def show(ckpt: str, path: Path, before: str | None, moves: Moves) -> None:
    """Print what was done, and how to continue or to undo it."""
    out = console()
    if before == path.name and not moves:
        out.print(f"latest is {one_line(path.name)} already: nothing to do")
    else:
        out.print(f"latest is {one_line(path.name)}" + (f", it was {one_line(before)}" if before else ""))
    for old, new in moves:
        out.print(f"renamed {one_line(old.name)} to {one_line(new.name)}")
    if doubt := checkpoint_doubt(path):
        out.print(f"note: {one_line(path.name)} is doubtful: {one_line(doubt)}")
    out.print(f"a run continues from it: type its command with what is to change, or resume={one_line(ckpt)}")
    if before and before != path.name:
        undo = ["mlm", "ckpt", "rollback", ckpt, str(int(before.rpartition("-")[2]))]
        out.print(f"until it does, this undoes it if that one is whole: {one_line(shlex.join(undo))}")
