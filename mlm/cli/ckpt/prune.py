"""`mlm ckpt prune`: delete old checkpoints of a run, and what killed saves left.

Kept: the newest keep_last whole checkpoints, multiples of keep_every, the one `latest` names and newer ones,
and what a roll-back set aside: that is its owner's to delete by hand. Of those that count as kept every byte
is read; others are whole as names and sizes tell, and `mlm ckpt verify` reads them. A damaged checkpoint
never counts as kept. It is deleted when keep_last whole ones are newer, as a whole one would be; a newer one
stays until its owner has looked at it: it may be the only trace of those steps.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from mlm.checkpoint.native.folders import (
    candidates,
    checkpoint_problem,
    checkpoints,
    clear_up,
    discard,
    leftovers,
    locate,
)
from mlm.checkpoint.native.format import RESTORE, CheckpointError
from mlm.checkpoint.native.retention import checkpoint_doubt, outdated
from mlm.cli.ckpt.verify import content_problem
from mlm.cli.conversion_settings import CkptPruneConfig
from mlm.tracking.history import FILE_NAME, diverged_since
from mlm.util.errors import UserError
from mlm.util.lock import single_writer
from mlm.util.terminal import add_row, console, format_bytes, table


@dataclass(frozen=True)
class Item:
    """A checkpoint, or what a killed save left."""

    path: Path
    bytes: int
    what: str
    """ "whole", "damaged: …" or "left by a killed save"."""
    is_outdated: bool


def run(config: CkptPruneConfig) -> None:
    """Delete checkpoints, or with dry_run list those that would be deleted.

    Raises UserError when the folder is in use or has no checkpoint, CheckpointError when something could not
    be deleted.
    """
    root, alone = locate(config.ckpt)
    if alone:
        raise UserError(f"ckpt={config.ckpt}: is one checkpoint; set ckpt=… to its run directory")
    with nullcontext() if config.dry_run else single_writer(root, setting="ckpt"):
        try:
            items = list_items(root, config)
            left = [] if config.dry_run else delete(root, items)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or root}: {error.strerror}: make it readable and writable"
            ) from error
    show(config, root, items, left)
    if left:
        raise CheckpointError(f"{left[0]}: could not be deleted: make it and its folder writable")


def list_items(root: Path, config: CkptPruneConfig) -> list[Item]:
    """All items of the folder, checkpoints first, to keep or delete. Raises OSError and CheckpointError."""
    since, counted, read = diverged_since(root.parent / FILE_NAME), candidates(root), dict[Path, str | None]()

    def problem_of(path: Path) -> str | None:
        return read.setdefault(path, content_problem(path))

    last, every = config.keep_last, config.keep_every
    old = outdated(root, keep_last=last, keep_every=every, since=since, problem_of=problem_of)
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
    """Bytes of a checkpoint's files, or of a file."""
    return sum(each.lstat().st_size for each in (path.iterdir() if path.is_dir() else [path]))


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


def show(config: CkptPruneConfig, root: Path, items: list[Item], left: list[Path]) -> None:
    """Print the table."""
    goes = "would be deleted" if config.dry_run else "deleted"
    made = table(f"ckpt prune · {root}", "", "size#", "", "")
    for item in items:
        done = "not deleted" if item.path in left else goes if item.is_outdated else "kept"
        add_row(made, item.path.name, format_bytes(item.bytes), done, item.what)
    out = console()
    out.print(made)
    freed = sum(item.bytes for item in items if item.is_outdated and item.path not in left)
    out.print(f"{format_bytes(freed)} {'would be ' if config.dry_run else ''}freed")
    damaged = [item for item in items if item.what.startswith("damaged") and not item.is_outdated]
    if damaged:
        out.print(f"damaged, kept and not counted: {len(damaged)}. Restore from a copy, or delete by hand")
