"""`mlm ckpt prune`: delete old checkpoints of a run, and what killed saves left.

Kept: the newest keep_last whole checkpoints, multiples of keep_every, the one `latest` names and newer ones,
and what a roll-back set aside: that is its owner's to delete by hand. Whole is meant as names and sizes tell,
which is quick; with verify=true every byte is read. A damaged checkpoint never counts as kept. It is deleted
when keep_last whole ones are newer, as a whole one would be; a newer one stays until its owner has looked at
it: it may be the only trace of those steps.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from mlm.checkpoint.commands.config import CkptPruneConfig
from mlm.checkpoint.native.folders import (
    REPLACED,
    candidates,
    checkpoint_problem,
    checkpoints,
    clear_up,
    discard,
    latest_name,
    leftovers,
    locate,
)
from mlm.checkpoint.native.format import RESTORE, CheckpointError
from mlm.checkpoint.native.retention import checkpoint_doubt, outdated
from mlm.checkpoint.native.verify import shard_bytes, verify_checkpoint
from mlm.tracking.history import FILE_NAME, diverged_since
from mlm.util.errors import UserError
from mlm.util.lock import single_writer
from mlm.util.terminal import add_row, console, format_bytes, one_line, progress_bar, table


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
    paths, since = list(checkpoints(root).values()), diverged_since(root.parent / FILE_NAME)
    problems: dict[Path, str | None] = {}
    with progress_bar("verifying", sum(map(shard_bytes, paths)), in_bytes=True) as advance:

        def problem(path: Path) -> str | None:
            if path not in problems:
                problems[path] = byte_problem(path, advance) if config.verify else checkpoint_problem(path)
            return problems[path]

        most, every = config.keep_last, config.keep_every
        old = set(outdated(root, keep_last=most, keep_every=every, since=since, problem=problem))
    items, counted = list[Item](), candidates(root)
    for path in paths:
        why = problems[path] if path in problems else checkpoint_problem(path)
        what = "whole" if why is None else f"damaged: {shorten(path, why)}"
        if why is None and (doubt := checkpoint_doubt(path, since)):
            what += f", doubtful: {doubt}"
        if path not in counted:
            what += ", newer than latest: kept and not counted"
        items.append(Item(path, bytes_of(path), what, path in old))
    return items + [Item(path, bytes_of(path), "left by a killed save", True) for path in leftovers(root)]


def byte_problem(path: Path, progress: Callable[[int], None]) -> str | None:
    """Why a checkpoint cannot be loaded, every byte read."""
    verified = verify_checkpoint(path, progress)
    return None if verified.loads else f"{verified.problems[0].file}: {verified.problems[0].why}"


def shorten(path: Path, why: str) -> str:
    """Return a problem without the directory and the remedy, for a row of a table."""
    return why.removeprefix(f"{path}/").removesuffix(f". {RESTORE}")


def bytes_of(path: Path) -> int:
    """Bytes of the files below a directory, or of a file."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    return sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(path) for name in names)


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
    named = latest_name(root)
    if named and not any(item.path.name.removeprefix(REPLACED) == named for item in items):
        out.print(f"note: latest names {one_line(named)}, which is not there; the newest whole one counts")
