"""Old checkpoints of a run and what killed saves left, listed and deleted: `mlm ckpt prune`.

Kept: the newest keep_last whole checkpoints, multiples of keep_every, the one `latest` names and newer ones,
and what a roll-back set aside: that is its owner's to delete by hand. Of those that count as kept every byte
is read; others are whole as names and sizes tell, and `mlm ckpt verify` reads them. A damaged checkpoint
never counts as kept. It is deleted when keep_last whole ones are newer, as a whole one would be; a newer one
stays until its owner has looked at it: it may be the only trace of those steps.
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
class Item:
    """A checkpoint, or what a killed save left."""

    path: Path
    bytes: int
    what: str
    """ "whole", "damaged: …" or "left by a killed save"."""
    is_outdated: bool


def list_items(root: Path, *, keep_last: int, keep_every: int, since: int | None) -> list[Item]:
    """Return all items of the folder, checkpoints first, to keep or delete.

    `since` is as in `outdated`. Raises OSError and CheckpointError.
    """
    counted, read = candidates(root), dict[Path, str | None]()

    def problem_of(path: Path) -> str | None:
        return read.setdefault(path, content_problem(path))

    old = outdated(root, keep_last=keep_last, keep_every=keep_every, since=since, problem_of=problem_of)
    items = []
    for path in checkpoints(root).values():
        if problem := read[path] if path in read else checkpoint_problem(path):
            what = f"damaged: {problem.removeprefix(f'{path}/').removesuffix(f'. {RESTORE}')}"
        else:
            doubt = checkpoint_doubt(path, since)
            what = f"whole, doubtful: {doubt}" if doubt else "whole"
        if path not in counted:
            what += ", newer than latest: kept and not counted"
        items.append(Item(path, bytes_of(path), what, path in old))
    return items + [Item(path, bytes_of(path), "left by a killed save", True) for path in leftovers(root)]


def bytes_of(path: Path) -> int:
    return sum(file.lstat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def delete(root: Path, items: list[Item]) -> list[Path]:
    """Delete the items to delete, oldest first, and rename back what a killed save moved aside.

    Returns what could not be deleted. Raises OSError.
    """
    killed = leftovers(root)
    failed = [
        item.path for item in items if item.is_outdated and item.path not in killed and not discard(item.path)
    ]
    clear_up(root)
    return failed + leftovers(root)
