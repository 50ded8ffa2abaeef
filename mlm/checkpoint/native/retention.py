"""Retention: which checkpoints of a run are good, which are kept, and which are deleted."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from mlm.checkpoint.native.folders import (
    candidates,
    checkpoints,
    discard,
    foreign_in,
    is_of_another_branch,
    named_latest,
    plain_name,
    problem_of,
)
from mlm.checkpoint.native.format import CheckpointError, read_summary
from mlm.checkpoint.native.norms import largest_jump
from mlm.checkpoint.native.run_state import not_finite_since
from mlm.util.errors import UserError

log = logging.getLogger(__name__)


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
    since: int | None = None,
    problem: Callable[[Path], str | None] = problem_of,
) -> list[Path]:
    """The checkpoints up to step `upto` (None: all) that retention deletes, oldest first.

    Kept: the `keep_last` newest good ones, at least one, and whatever is newer; multiples of `keep_every`
    (0: none); the one `latest` names; and those of another branch than that one, which count for nothing: a
    user rolled back, and deleting what was abandoned is theirs. Good are whole ones that are not doubtful. A
    damaged one, of which `problem(directory)` says why, never counts as kept: it is deleted when `keep_last`
    good ones are newer, so where none is good nothing is. Of doubtful ones `keep_last` are kept besides;
    where no step from `since` on was finite, the weights before it are doubtful too.
    `problem` is called from the newest on, as long as it matters. Raises CheckpointError when `root` cannot
    be read.
    """
    named, found, old = named_latest(root), checkpoints(root), list[Path]()
    most, good, doubtful = max(keep_last, 1), 0, 0
    head = next((path for path in found.values() if plain_name(path) == named), None)
    for step, path in reversed(found.items()):
        if (upto is not None and step > upto) or (head and is_of_another_branch(path, head)):
            continue
        if good < most:
            if doubt_of(path, since) is None:
                good += problem(path) is None
                continue
            doubtful += 1
            if doubtful <= most:
                continue
        if not (keep_every and step % keep_every == 0) and path != head and _is_deletable(path):
            old.append(path)
    return old[::-1]


def doubt_of(directory: Path, since: int | None = None) -> str | None:
    """Why a checkpoint may be of a run that has gone wrong; None if its manifest does not say so.

    `since` is the first of the run's steps that were not finite, if it has diverged.
    """
    if since is not None and _step_of(directory) >= since - 1:
        return f"no step after it was finite since step {since}"
    try:
        summary = read_summary(directory)
    except (UserError, OSError):
        return None
    if since := not_finite_since(summary.state):
        return f"steps are not finite since step {since}"
    jump = jump_of(directory)
    return jump and f"the norm of {jump[0]} is {jump[1]:.3g} times what it was"


def jump_of(directory: Path) -> tuple[str, float] | None:
    """The weight that grew most since the checkpoint before, and its factor; None if none jumped."""
    return largest_jump(read_summary(directory).tensors)


def newest_good(root: Path, since: int | None = None) -> Path | None:
    """The newest checkpoint to continue from that is whole and not doubtful; None if there is none.

    Where all are doubtful, the newest one whose weights have not jumped.

    If no step from `since` on was finite, the weights after step `since` - 1 are not good: an older one is
    taken. Of the branch that `latest` names. Raises CheckpointError when `root` cannot be read.
    """
    found = [path for path in candidates(root) if since is None or _step_of(path) < since - 1]
    whole = [path for path in found if problem_of(path) is None]
    good = [path for path in whole if doubt_of(path) is None]
    # steps that are not finite change no weight: where all else is lacking, those before them may do
    return next(iter([*good, *(path for path in whole if jump_of(path) is None)]), None)


def _step_of(directory: Path) -> int:
    return int(plain_name(directory).removeprefix("step-"))


def _is_deletable(path: Path) -> bool:
    """True if nothing in a checkpoint's directory is the user's, and this process may delete all of it."""
    try:
        return foreign_in(path) is None and os.access(path, os.R_OK | os.W_OK | os.X_OK)
    except OSError:
        return False
