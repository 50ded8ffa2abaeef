"""`mlm ckpt rollback`: continue a run from an earlier checkpoint; newer ones are set aside."""

import shlex
from functools import cache
from pathlib import Path

from mlm.checkpoint.native.folders import BEST, CHECKPOINTS, checkpoints, latest_name, locate, step_name
from mlm.checkpoint.native.format import CheckpointError, read_manifest_head
from mlm.checkpoint.native.retention import Moves, checkpoint_doubt, choose_step, move_latest
from mlm.checkpoint.native.run_state import is_weights_only
from mlm.checkpoint.native.verify import content_problem
from mlm.cli.ckpt.settings import CkptRollbackConfig
from mlm.tracking.history import FILE_NAME, diverged_since
from mlm.training.mirror import Mirror
from mlm.util.errors import UserError
from mlm.util.lock import single_writer
from mlm.util.object_store import is_stored, split_step
from mlm.util.ownership import RUN_SETTINGS
from mlm.util.terminal import console, one_line


def run(config: CkptRollbackConfig) -> None:
    """Move `latest`, and print the way forward and back.

    Raises UserError when the folder is in use or has no such checkpoint, CorruptFileError when it is not
    whole, CheckpointError when something cannot be renamed.
    """
    if is_stored(config.ckpt):
        url, step = split_step(config.ckpt)
        mirror = Mirror(url)
        previous = latest_name(mirror.root)
        step = mirror.choose_step(config.step if step is None else step, "step")
        moves = move_latest(mirror.root, step)
        mirror.write()
        line = f"a run continues from it: type its command with what is to change, or resume={one_line(url)}"
        return print_result(url, mirror.root / step_name(step), previous, moves, line)
    root, is_single = locate(config.ckpt)
    if is_single:
        raise UserError(f"ckpt={config.ckpt}: is one checkpoint; set ckpt=… to its run directory")
    with single_writer(root, setting="ckpt"):
        try:
            previous, bad_step = latest_name(root), diverged_since(root.parent / FILE_NAME)
            step = choose_step(root, config.step, since=bad_step, problem_of=cache(content_problem))
            moves = move_latest(root, step)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename2 or error.filename or root}: {error.strerror}: make it writable, or free "
                "space there"
            ) from error
    path = root / step_name(step)
    print_result(config.ckpt, path, previous, moves, continuation(root, path))
    later = [path for n, path in checkpoints(root.parent / BEST / CHECKPOINTS).items() if n > step]
    for path in later if root.parent.name != BEST else ():
        line = f"note: {path} validated best and stays: ckpt={config.ckpt} takes it until a run keeps another"
        console().print(one_line(line))


def continuation(root: Path, path: Path) -> str:
    """Return a line on how to continue from a checkpoint in `root`, or to begin with its weights."""
    run = root.parent if root.name == CHECKPOINTS else root
    if is_weights_only(read_manifest_head(path).state):
        return f"a run begins with these weights by ckpt={one_line(str(run))} and another out=…"
    resume = f", or resume={one_line(str(run))}" if (run / RUN_SETTINGS).is_file() else ""
    return f"a run continues from {one_line(str(path))}: type its command with what is to change{resume}"


def print_result(ckpt: str, path: Path, previous: str | None, moves: Moves, continuation: str) -> None:
    out = console()
    if previous == path.name and not moves:
        out.print(f"latest is {one_line(path.name)} already: nothing to do")
    else:
        out.print(f"latest is {one_line(path.name)}" + (f", it was {one_line(previous)}" if previous else ""))
    for old, new in moves:
        out.print(f"renamed {one_line(old.name)} to {one_line(new.name)}")
    if doubt := checkpoint_doubt(path):
        out.print(f"note: {one_line(path.name)} is doubtful: {one_line(doubt)}")
    out.print(continuation)
    if previous and previous != path.name:
        undo = ["mlm", "ckpt", "rollback", ckpt, str(int(previous.rpartition("-")[2]))]
        out.print(f"until it does, this undoes it if that one is whole: {one_line(shlex.join(undo))}")
