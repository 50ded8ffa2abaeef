"""Retention and rollback: the checkpoints of a run to keep, to delete, and to continue from."""

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
"""(old path, new path) of renamed checkpoints."""


def prune(root: Path, *, keep_last: int, keep_every: int, since: int | None = None) -> None:
    """Delete old checkpoints after a save. Never raises: a leftover does not fail a save."""
    try:
        outdated_paths = outdated(root, keep_last=keep_last, keep_every=keep_every, since=since)
    except CheckpointError as e:
        log.warning("old checkpoints were not pruned: %s", e)
        return
    for path in outdated_paths:
        discard(path)


def outdated(
    root: Path,
    *,
    keep_last: int,
    keep_every: int,
    since: int | None = None,
    problem_of: Callable[[Path], str | None] = checkpoint_problem,
) -> list[Path]:
    """Return the checkpoints that retention deletes, oldest first.

    A checkpoint is good if it is whole and not doubtful. Kept: the `keep_last` newest good ones, at least
    one, and everything newer; as many doubtful ones; multiples of `keep_every` (0: none); the one `latest`
    names, and newer ones. A damaged checkpoint never counts: it is deleted if `keep_last` good ones are
    newer, so without good ones nothing is deleted. `since` is as in `checkpoint_doubt`; `problem_of` is
    called for checkpoints that would count, the newest first, until enough are whole. Raises CheckpointError
    if `root` cannot be read.
    """
    latest, outdated_paths, paths = latest_name(root), list[Path](), candidates(root)
    least_kept, good, doubtful, since = max(keep_last, 1), 0, 0, _first_doubt(paths, since)
    for path in paths:
        if good < least_kept:
            if checkpoint_doubt(path, since) is None:
                good += problem_of(path) is None
                continue
            doubtful += 1
            if doubtful <= least_kept:
                continue
        if (keep_every and step_of(path) % keep_every == 0) or step_directory_name(path) == latest:
            continue
        with suppress(OSError):
            if foreign_in(path) is None and os.access(path, os.R_OK | os.W_OK | os.X_OK):
                outdated_paths.append(path)
    return outdated_paths[::-1]


def checkpoint_doubt(directory: Path, since: int | None = None) -> str | None:
    """Return why a checkpoint may be of a run that has gone wrong; None if nothing in its manifest says so.

    `since` is the first step of the run that has gone wrong, if any; the weights before it are doubtful too.
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
    """Return the newest checkpoint to continue from that is whole and not doubtful; None without one.

    If all are doubtful, but only for steps that are not finite, which change no weight: the newest one before
    step `since` - 1 whose weights have not jumped. Raises CheckpointError if `root` cannot be read.
    """
    paths, reported_since = candidates(root), since
    since = _first_doubt(paths, since)
    for path in paths:
        if checkpoint_doubt(path, since) is None and problem_of(path) is None:
            return path
    earlier = (path for path in paths if reported_since is None or step_of(path) < reported_since - 1)
    for path in (path for path in earlier if problem_of(path) is None):
        head = read_manifest_head(path)
        is_unchanged = doubtful_since(head.state) == not_finite_since(head.state)
        if is_unchanged and largest_jump(head.tensors) is None:
            return path
    return None


def _first_doubt(paths: Sequence[Path], since: int | None) -> int | None:
    """Return the first step that has gone wrong by `since` or by the newest checkpoint; None for neither.

    The newest checkpoint does not count if all it records are steps that are not finite: they change no
    weight, so older checkpoints may be good.
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
    """Return the step to move to: `step`, which the user set by `setting`, or the newest good one.

    Warnings name newer checkpoints that are passed over. `since` and `problem_of` are as in `newest_good`;
    `location` is `root` for messages. Raises UserError, CorruptFileError.
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
                reason = problem_of(path) or str(checkpoint_doubt(path, since))
                log.warning("%s is passed over: %s", path.name, reason.replace(str(root), location))
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
    """Return the checkpoints that `latest` can be moved to, by step: all in place, and descendants set aside.

    Raises OSError, and CheckpointError if `root` cannot be read.
    """
    present, name = checkpoints(root), latest_name(root)
    head = next((path for path in present.values() if step_directory_name(path) == name), None)
    return dict(sorted({**(descendants_set_aside(root, head) if head else {}), **present}.items()))


def move_latest(root: Path, step: int) -> Moves:
    """Point `latest` at a reachable step, with its ancestors in place and newer checkpoints set aside.

    A kill at any instant leaves a `latest` that can be loaded; the same call then completes the move. Raises
    OSError, and as `read_manifest` does.
    """
    clear_up(root)
    paths = reachable(root)
    ancestors, restored, newer = ancestors_of(paths[step]), Moves(), Moves()
    for other_step, path in paths.items():
        in_place = path.name == step_name(other_step)
        if other_step > step and in_place:
            newer.append((path, free_name(root, other_step)))
        elif not in_place and (
            other_step == step or Save(other_step, read_manifest_head(path).save_id) in ancestors
        ):
            restored.append((path, root / step_name(other_step)))
    for old_path, new_path in restored:
        os.rename(old_path, new_path)
    point_latest(root, step)
    for old_path, new_path in newer:
        os.rename(old_path, new_path)
    fsync_directory(root)
    return restored + newer


def step_list(paths: dict[int, Path]) -> str:
    """Return the steps for a message, marked if set aside."""
    return ", ".join(
        f"{step}{'' if path.name == step_name(step) else ' (set aside)'}" for step, path in paths.items()
    )
