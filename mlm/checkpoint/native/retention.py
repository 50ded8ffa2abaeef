"""Retention and rollback: which checkpoints of a run are good, kept, deleted, and continued from."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mlm.checkpoint.native.folders import (
    ancestors_of,
    candidates,
    checkpoint_problem,
    checkpoints,
    clear_up,
    descendants_set_aside,
    discard,
    foreign_in,
    free_name,
    latest_name,
    point_latest,
    step_directory_name,
    step_name,
    step_of,
)
from mlm.checkpoint.native.format import CheckpointError, read_manifest_head
from mlm.checkpoint.native.norms import largest_jump
from mlm.checkpoint.native.run_state import Save, doubtful_since, not_finite_since
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import fsync_directory

log = logging.getLogger(__name__)

Moves = list[tuple[Path, Path]]
"""Paths of checkpoints before and after they were renamed."""


def prune(root: Path, *, keep_last: int, keep_every: int, since: int | None = None) -> None:
    """Delete old checkpoints after a save. Never raises: a leftover does not fail a save."""
    try:
        old = outdated(root, keep_last=keep_last, keep_every=keep_every, since=since)
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
    since: int | None = None,
    problem_of: Callable[[Path], str | None] = checkpoint_problem,
) -> list[Path]:
    """The checkpoints that retention deletes, oldest first.

    Kept: the `keep_last` newest good ones, at least one, and whatever is newer; multiples of `keep_every`
    (0: none); the one `latest` names, and what is newer than that. Good are whole ones that are not doubtful.
    A damaged one never counts as kept: it is deleted when `keep_last` good ones are newer, so where none is
    good nothing is. Of doubtful ones `keep_last` are kept besides. `since` is as in `checkpoint_doubt`;
    `problem_of` is asked of those that would be kept and counted, the newest first, until enough are whole.
    Raises CheckpointError when `root` cannot be read.
    """
    named, old, paths = latest_name(root), list[Path](), candidates(root)
    most, good, doubtful, since = max(keep_last, 1), 0, 0, _first_doubt(paths, since)
    for path in paths:
        if good < most:
            if checkpoint_doubt(path, since) is None:
                good += problem_of(path) is None
                continue
            doubtful += 1
            if doubtful <= most:
                continue
        if (keep_every and step_of(path) % keep_every == 0) or step_directory_name(path) == named:
            continue
        with suppress(OSError):
            if foreign_in(path) is None and os.access(path, os.R_OK | os.W_OK | os.X_OK):
                old.append(path)
    return old[::-1]


def checkpoint_doubt(directory: Path, since: int | None = None) -> str | None:
    """Why a checkpoint may be of a run that has gone wrong; None if its manifest does not say so.

    `since` is the first of the run's steps that have gone wrong, if it has: the weights before it are
    doubtful too.
    """
    if since is not None and step_of(directory) >= since - 1:
        return f"the run has gone wrong since step {since}"
    try:
        summary = read_manifest_head(directory)
    except (UserError, OSError):
        return None
    if since := not_finite_since(summary.state):
        return f"steps are not finite since step {since}"
    if since := doubtful_since(summary.state):
        return f"the loss is far above its best, or replicas differ, since step {since}"
    jump = largest_jump(summary.tensors)
    return jump and f"the norm of {jump[0]} is {jump[1]:.3g} times what it was"


def newest_good(
    root: Path, since: int | None = None, problem_of: Callable[[Path], str | None] = checkpoint_problem
) -> Path | None:
    """The newest checkpoint to continue from that is whole and not doubtful; None if there is none.

    Where all are doubtful, the newest one before step `since` - 1 whose weights have not jumped, if only for
    steps that are not finite: they change no weight. Raises CheckpointError when `root` cannot be read.
    """
    paths, given = candidates(root), since
    since = _first_doubt(paths, since)
    for path in paths:
        if checkpoint_doubt(path, since) is None and problem_of(path) is None:
            return path
    before = (path for path in paths if given is None or step_of(path) < given - 1)
    for path in (path for path in before if problem_of(path) is None):
        head = read_manifest_head(path)
        is_unchanged = doubtful_since(head.state) == not_finite_since(head.state)
        if is_unchanged and largest_jump(head.tensors) is None:
            return path
    return None


def _first_doubt(paths: Sequence[Path], since: int | None) -> int | None:
    """The first step that has gone wrong by `since` or by the newest checkpoint; None if neither says so.

    Steps that are not finite change no weight: where they are all that it tells, older ones may be good.
    """
    steps = [since]
    with suppress(UserError, OSError):
        states = [read_manifest_head(path).state for path in paths[:1]]
        steps += [first for x in states if (first := doubtful_since(x)) != not_finite_since(x)]
    return min(filter(None, steps), default=None)


def choose_step(
    root: Path,
    step: int | None,
    *,
    since: int | None,
    problem_of: Callable[[Path], str | None] = checkpoint_problem,
    setting: str = "step",
    location: str | None = None,
) -> int:
    """Return the step to move to: the one asked for by `setting`, or the newest good one.

    A warning says what is newer and passed over. `since` and `problem_of` are as in `newest_good`; `location`
    is `root` for messages. Raises UserError, CorruptFileError.
    """
    paths, location = reachable(root), location or str(root)
    if step is None:
        good = newest_good(root, since, problem_of)
        if good is None:
            raise CorruptFileError(
                f"{location}: no checkpoint is good; name one with {setting}=… (of {step_list(paths)})"
            )
        for path in candidates(root):
            if step_of(path) > step_of(good):
                why = problem_of(path) or str(checkpoint_doubt(path, since))
                log.warning("%s is passed over: %s", path.name, why.replace(str(root), location))
        return step_of(good)
    if step not in paths:
        raise UserError(
            f"{setting}={step}: no checkpoint to move to; set {setting}=… to one of {step_list(paths)}"
        )
    if problem := problem_of(paths[step]):
        raise CorruptFileError(
            f"{setting}={step}: {problem}; set {setting}=… to another of {step_list(paths)}"
        )
    return step


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
