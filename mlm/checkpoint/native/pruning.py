"""Old checkpoints of a run and leftovers of killed saves, listed and deleted: `mlm ckpt prune`.

Kept: the newest keep_last whole checkpoints, multiples of keep_every, the one `latest` names and newer ones,
and checkpoints that a rollback set aside, which users delete by hand. Checkpoints that count as kept are read
in full, others are checked by names and sizes. A damaged checkpoint never counts. It is deleted like a whole
one if keep_last whole ones are newer; a newer damaged one stays: it may be the only trace of its steps.
"""

from dataclasses import dataclass
from pathlib import Path

from mlm.checkpoint.native.folders import (
    candidates,
    checkpoint_problem,
    checkpoints,
    clear_up,
    discard,
    leftovers,
)
from mlm.checkpoint.native.format import RESTORE
from mlm.checkpoint.native.retention import checkpoint_doubt, outdated
from mlm.checkpoint.native.verify import content_problem


@dataclass(frozen=True)
class PruneItem:
    """A checkpoint, or a leftover of a killed save."""

    path: Path
    bytes: int
    description: str
    """ "whole", "damaged: …" or "left by a killed save"."""
    is_outdated: bool


def list_items(root: Path, *, keep_last: int, keep_every: int, since: int | None) -> list[PruneItem]:
    """Return all items of the folder, checkpoints first, to keep or delete.

    `since` is as in `outdated`. Raises OSError and CheckpointError.
    """
    candidate_paths, problems = candidates(root), dict[Path, str | None]()

    def problem_of(path: Path) -> str | None:
        return problems.setdefault(path, content_problem(path))

    outdated_paths = outdated(
        root, keep_last=keep_last, keep_every=keep_every, since=since, problem_of=problem_of
    )
    items = []
    for path in checkpoints(root).values():
        if problem := problems[path] if path in problems else checkpoint_problem(path):
            description = f"damaged: {problem.removeprefix(f'{path}/').removesuffix(f'. {RESTORE}')}"
        else:
            doubt = checkpoint_doubt(path, since)
            description = f"whole, doubtful: {doubt}" if doubt else "whole"
        if path not in candidate_paths:
            description += ", newer than latest: kept and not counted"
        items.append(PruneItem(path, bytes_of(path), description, path in outdated_paths))
    killed = [PruneItem(path, bytes_of(path), "left by a killed save", True) for path in leftovers(root)]
    return items + killed


def bytes_of(path: Path) -> int:
    return sum(file.lstat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def delete(root: Path, items: list[PruneItem]) -> list[Path]:
    """Delete outdated items, oldest first, and restore a checkpoint that a killed save moved aside.

    Returns the paths that could not be deleted. Raises OSError.
    """
    killed = leftovers(root)
    failed = [
        item.path for item in items if item.is_outdated and item.path not in killed and not discard(item.path)
    ]
    clear_up(root)
    return failed + leftovers(root)
