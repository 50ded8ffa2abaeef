"""`mlm ckpt rollback`: continue a run from an earlier checkpoint; newer ones are set aside."""

import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mlm.cli.command import Command
from mlm.config.fields import NOT_NEGATIVE, StoredCheckpoint
from mlm.util.errors import UserError
from mlm.util.lock import single_writer
from mlm.util.object_store import is_stored, split_step

if TYPE_CHECKING:  # which needs torch
    from mlm.checkpoint.native.retention import Moves


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptRollbackConfig:
    """The run spec of `mlm ckpt rollback`: continue a run from an earlier checkpoint."""

    ckpt: StoredCheckpoint
    """Run directory, folder of checkpoints, or s3://BUCKET/PREFIX of a run's mirror (`@STEP` names one)."""
    step: Annotated[int, NOT_NEGATIVE] | None = None
    """Step of the checkpoint to continue from; null takes the newest good one."""


def run(config: CkptRollbackConfig) -> None:
    """Move `latest`, and print the way forward and back.

    Raises UserError when the folder is in use or has no such checkpoint, CorruptFileError when it is not
    whole, CheckpointError when something cannot be renamed.
    """
    from mlm.checkpoint.native.folders import latest_name, locate, step_name
    from mlm.checkpoint.native.format import CheckpointError
    from mlm.checkpoint.native.retention import choose_step, move_latest
    from mlm.checkpoint.native.verify import content_problem
    from mlm.tracking.history import FILE_NAME, diverged_since
    from mlm.training.mirror import Mirror

    if is_stored(config.ckpt):
        url, step = split_step(config.ckpt)
        mirror = Mirror(url)
        before = latest_name(mirror.root)
        step = mirror.choose_step(config.step if step is None else step, "step")
        moves = move_latest(mirror.root, step)
        mirror.write()
        return show(url, mirror.root / step_name(step), before, moves)
    root, alone = locate(config.ckpt)
    if alone:
        raise UserError(f"ckpt={config.ckpt}: is one checkpoint; set ckpt=… to its run directory")
    with single_writer(root, setting="ckpt"):
        try:
            before, since = latest_name(root), diverged_since(root.parent / FILE_NAME)
            step = choose_step(root, config.step, since=since, problem_of=cache(content_problem))
            moves = move_latest(root, step)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or root}: {error.strerror}: make it writable, or free space there"
            ) from error
    show(config.ckpt, root / step_name(step), before, moves)


def show(ckpt: str, path: Path, before: str | None, moves: "Moves") -> None:
    """Print what was done, and how to continue or to undo it."""
    from mlm.checkpoint.native.retention import checkpoint_doubt
    from mlm.util.terminal import console, one_line

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


ROLLBACK = Command(
    words=("ckpt", "rollback"),
    spec=CkptRollbackConfig,
    target="mlm.cli.ckpt.rollback:run",
    positional=("ckpt", "step"),
    summary="continue a run from an earlier checkpoint; newer ones are set aside",
    about=(
        "Points `latest` at a checkpoint, by default the newest good one: whole, finite, and older than "
        "the steps that were not finite. Newer ones are renamed aside-step-…, not deleted; until "
        "training continues, the same command with a newer step goes forward again. Rejected while a "
        "run uses the folder; a run whose mirror is rolled back uploads no more."
    ),
    examples=(
        ("Back to the newest good checkpoint", "mlm ckpt rollback runs/shakespeare"),
        ("Back to that of step 900", "mlm ckpt rollback runs/shakespeare 900"),
        ("In the store that a run's checkpoint.mirror names", "mlm ckpt rollback s3://bucket/runs/a 900"),
    ),
)
