"""`mlm ckpt rollback`: continue a run from an earlier checkpoint; newer ones are set aside."""

import shlex
from pathlib import Path

from mlm.checkpoint.commands.config import CkptRollbackConfig
from mlm.checkpoint.native.folders import (
    locate,
    named_latest,
    problem_of,
    step_name,
)
from mlm.checkpoint.native.format import CheckpointError
from mlm.checkpoint.native.retention import doubt_of, newest_good
from mlm.checkpoint.native.rollback import Move, move_latest, reachable
from mlm.tracking.history import FILE_NAME, diverged_since
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.lock import sole_writer
from mlm.util.terminal import console, plain


def run(config: CkptRollbackConfig) -> None:
    """Move `latest`, and print the way forward and back.

    Raises UserError when the folder is in use or has no such checkpoint, CorruptFileError when it is not
    whole, CheckpointError when something cannot be renamed.
    """
    root, alone = locate(config.ckpt)
    if alone:
        raise UserError(f"ckpt={config.ckpt}: is one checkpoint; set ckpt=… to its run directory")
    with sole_writer(root, setting="ckpt"):
        try:
            before = named_latest(root)
            step = find_step(root, config)
            moves = move_latest(root, step)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or root}: {error.strerror}: make it readable and writable"
            ) from error
    show(config.ckpt, root / step_name(step), before, moves)


def find_step(root: Path, config: CkptRollbackConfig) -> int:
    """Return the step to move to: the one asked for, or the newest good one. Raises UserError."""
    found = reachable(root)
    if config.step is None:
        good = newest_good(root, diverged_since(root.parent / FILE_NAME))
        if good is None:
            raise CorruptFileError(
                f"{root}: no checkpoint is good; name one with step=… (of {listed(found)})"
            )
        return int(good.name.rpartition("-")[2])
    if config.step not in found:
        raise UserError(f"step={config.step}: no checkpoint to move to; set step=… to one of {listed(found)}")
    if problem := problem_of(found[config.step]):
        raise CorruptFileError(f"step={config.step}: {problem}; set step=… to another of {listed(found)}")
    return config.step


def listed(found: dict[int, Path]) -> str:
    """Return steps, those set aside marked."""
    return ", ".join(
        f"{step}{'' if path.name == step_name(step) else ' (set aside)'}" for step, path in found.items()
    )


def show(ckpt: str, path: Path, before: str | None, moves: list[Move]) -> None:
    """Print what was done, and how to continue or to undo it."""
    out = console()
    if before == path.name and not moves:
        out.print(f"latest is {plain(path.name)} already: nothing to do")
    else:
        out.print(f"latest is {plain(path.name)}" + (f", it was {plain(before)}" if before else ""))
    for move in moves:
        out.print(f"renamed {plain(move.before.name)} to {plain(move.after.name)}")
    if doubt := doubt_of(path):
        out.print(f"note: {plain(path.name)} is doubtful: {plain(doubt)}")
    out.print(f"a run continues from it: type its command with what is to change, or resume={plain(ckpt)}")
    if before and before != path.name:
        undo = ["mlm", "ckpt", "rollback", ckpt, str(int(before.rpartition("-")[2]))]
        out.print(f"until it does, this undoes it: {plain(shlex.join(undo))}")
