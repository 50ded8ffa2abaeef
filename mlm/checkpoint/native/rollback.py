"""Return to an earlier checkpoint of a run, and forward again until training continues.

Newer checkpoints are renamed `aside-step-…`, which nothing loads, counts or deletes.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mlm.checkpoint.native.folders import (
    checkpoints,
    clear_up,
    is_of_another_branch,
    named_latest,
    plain_name,
    point_latest,
    step_name,
)
from mlm.util.atomic import fsync_directory

ASIDE = re.compile(r"aside-step-(\d{8,18})(-\d+)?")


@dataclass(frozen=True)
class Move:
    """A checkpoint that was renamed."""

    before: Path
    after: Path


def set_aside(root: Path, head: Path) -> dict[int, Path]:
    """Checkpoints by step that roll-backs set aside and that descend from `head`. Raises OSError."""
    found = {int(match[1]): path for path in sorted(root.iterdir()) if (match := ASIDE.fullmatch(path.name))}
    # an unknown past is that of an older version, whose steps are all one branch
    return {step: path for step, path in sorted(found.items()) if not is_of_another_branch(path, head)}


def reachable(root: Path) -> dict[int, Path]:
    """Checkpoints by step that `latest` can be moved to: those in their place, and its set aside descendants.

    Raises OSError, and CheckpointError when `root` cannot be read.
    """
    found = checkpoints(root)
    head = next((path for path in found.values() if plain_name(path) == named_latest(root)), None)
    aside = {} if head is None else set_aside(root, head)
    return dict(sorted({**aside, **found}.items()))


def move_latest(root: Path, step: int) -> list[Move]:
    """Point `latest` at a reachable step, with what is older in its place and what is newer set aside.

    A kill at any instant leaves a `latest` that can be loaded; the same call then does the rest. Raises
    OSError and what reading the manifest of `step` raises.
    """
    clear_up(root)
    found = reachable(root)
    restored = [
        Move(path, root / step_name(other))
        for other, path in found.items()
        if other <= step and path.name != step_name(other)
    ]
    newer = [
        Move(path, free_name(root, other))
        for other, path in found.items()
        if other > step and path.name == step_name(other)
    ]
    for move in restored:
        os.rename(move.before, move.after)
    point_latest(root, step)
    for move in newer:
        os.rename(move.before, move.after)
    fsync_directory(root)
    return restored + newer


def free_name(root: Path, step: int) -> Path:
    """Return a name for a checkpoint to set aside: another branch may have one of this step."""
    path, number = root / f"aside-{step_name(step)}", 1
    while os.path.lexists(path):
        number += 1
        path = root / f"aside-{step_name(step)}-{number}"
    return path
