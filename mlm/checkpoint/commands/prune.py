"""`mlm ckpt prune`: delete old checkpoints of a run, and what killed saves left.

Kept: the newest keep_last whole checkpoints, multiples of keep_every, the one `latest` names, and those of
another branch than that one: what a roll-back abandoned is its owner's to delete by hand. Whole is meant
as names and sizes tell, which is quick; with verify=true every byte is read. A damaged checkpoint never
counts as kept. It is deleted when keep_last whole ones are newer, as a whole one would be; a newer one stays
until its owner has looked at it: it may be the only trace of those steps.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from mlm.checkpoint.commands.config import CkptPruneConfig
from mlm.checkpoint.native.folders import (
    REPLACED,
    checkpoints,
    clear_up,
    discard,
    is_of_another_branch,
    leftovers,
    locate,
    named_latest,
    plain_name,
    problem_of,
)
from mlm.checkpoint.native.format import RESTORE, CheckpointError
from mlm.checkpoint.native.retention import doubt_of, outdated
from mlm.checkpoint.native.verify import shard_bytes, verify_checkpoint
from mlm.tracking.history import FILE_NAME, diverged_since
from mlm.util.errors import UserError
from mlm.util.lock import sole_writer
from mlm.util.terminal import add_row, console, plain, progress_bar, size, table


@dataclass(frozen=True)
class Item:
    """A checkpoint, or what a killed save left."""

    path: Path
    bytes: int
    what: str
    """ "whole", "damaged: …" or "left by a killed save"."""
    goes: bool


def run(config: CkptPruneConfig) -> None:
    """Delete checkpoints, or with dry_run list those that would be deleted.

    Raises UserError when the folder is in use or has no checkpoint, CheckpointError when something could not
    be deleted.
    """
    root, alone = locate(config.ckpt)
    if alone:
        raise UserError(f"ckpt={config.ckpt}: is one checkpoint; set ckpt=… to its run directory")
    with nullcontext() if config.dry_run else sole_writer(root, setting="ckpt"):
        try:
            items = look(root, config)
            left = [] if config.dry_run else delete(root, items)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or root}: {error.strerror}: make it readable and writable"
            ) from error
    show(config, root, items, left)
    if left:
        raise CheckpointError(f"{left[0]}: could not be deleted: make it and its folder writable")


def look(root: Path, config: CkptPruneConfig) -> list[Item]:
    """All items of the folder, checkpoints first, to keep or delete. Raises OSError and CheckpointError."""
    found, since = list(checkpoints(root).values()), diverged_since(root.parent / FILE_NAME)
    problems: dict[Path, str | None] = {}
    with progress_bar("verifying", sum(map(shard_bytes, found)), in_bytes=True) as advance:

        def problem(path: Path) -> str | None:
            if path not in problems:
                problems[path] = read_all(path, advance) if config.verify else problem_of(path)
            return problems[path]

        most, every = config.keep_last, config.keep_every
        old = set(outdated(root, keep_last=most, keep_every=every, since=since, problem=problem))
    head = next((path for path in found if plain_name(path) == named_latest(root)), None)
    items = []
    for path in found:
        why = problems[path] if path in problems else problem_of(path)
        what = "whole" if why is None else f"damaged: {said_shortly(path, why)}"
        if why is None and (doubt := doubt_of(path, since)):
            what += f", doubtful: {doubt}"
        if head is not None and is_of_another_branch(path, head):
            what += ", of another branch than latest: kept and not counted"
        items.append(Item(path, bytes_of(path), what, path in old))
    return items + [Item(path, bytes_of(path), "left by a killed save", True) for path in leftovers(root)]


def read_all(path: Path, progress: Callable[[int], None]) -> str | None:
    """Why a checkpoint cannot be loaded, every byte read."""
    found = verify_checkpoint(path, progress)
    return None if found.loads else f"{found.problems[0].file}: {found.problems[0].why}"


def said_shortly(path: Path, why: str) -> str:
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
    failed = [item.path for item in items if item.goes and item.path not in killed and not discard(item.path)]
    clear_up(root)
    return failed + leftovers(root)


def show(config: CkptPruneConfig, root: Path, items: list[Item], left: list[Path]) -> None:
    """Print the table."""
    goes = "would be deleted" if config.dry_run else "deleted"
    made = table(f"ckpt prune · {root}", "", "size#", "", "")
    for item in items:
        done = "not deleted" if item.path in left else goes if item.goes else "kept"
        add_row(made, item.path.name, size(item.bytes), done, item.what)
    out = console()
    out.print(made)
    freed = sum(item.bytes for item in items if item.goes and item.path not in left)
    out.print(f"{size(freed)} {'would be ' if config.dry_run else ''}freed")
    damaged = [item for item in items if item.what.startswith("damaged") and not item.goes]
    if damaged:
        out.print(f"damaged, kept and not counted: {len(damaged)}. Restore from a copy, or delete by hand")
    named = named_latest(root)
    if named and not any(item.path.name.removeprefix(REPLACED) == named for item in items):
        out.print(f"note: latest names {plain(named)}, which is not there; the newest whole one counts")
