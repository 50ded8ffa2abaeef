"""`mlm ckpt prune`: delete old checkpoints of a run, and what killed saves left."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mlm.cli.command import Command
from mlm.config.fields import NOT_NEGATIVE, POSITIVE, CheckpointPath
from mlm.util.errors import UserError
from mlm.util.lock import single_writer

if TYPE_CHECKING:  # which needs torch
    from mlm.checkpoint.native.pruning import Item


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptPruneConfig:
    """The run spec of `mlm ckpt prune`: delete old checkpoints of a run."""

    ckpt: CheckpointPath
    """Run directory, or folder of checkpoints."""
    keep_last: Annotated[int, POSITIVE] = 2
    """Newest whole checkpoints kept; the one to continue from always is."""
    keep_every: Annotated[int, NOT_NEGATIVE] = 0
    """Checkpoints at multiples of this step are kept too; 0 keeps none for that."""
    dry_run: bool = False
    """Only list what would be deleted."""


def run(config: CkptPruneConfig) -> None:
    """Delete checkpoints, or with dry_run list those that would be deleted.

    Raises UserError when the folder is in use or has no checkpoint, CheckpointError when something could not
    be deleted.
    """
    from mlm.checkpoint.native.folders import locate
    from mlm.checkpoint.native.format import CheckpointError
    from mlm.checkpoint.native.pruning import delete, list_items
    from mlm.tracking.history import FILE_NAME, diverged_since

    root, alone = locate(config.ckpt)
    if alone:
        raise UserError(f"ckpt={config.ckpt}: is one checkpoint; set ckpt=… to its run directory")
    with nullcontext() if config.dry_run else single_writer(root, setting="ckpt"):
        try:
            since = diverged_since(root.parent / FILE_NAME)
            items = list_items(root, keep_last=config.keep_last, keep_every=config.keep_every, since=since)
            left = [] if config.dry_run else delete(root, items)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or root}: {error.strerror}: make it readable and writable"
            ) from error
    show(config, root, items, left)
    if left:
        raise CheckpointError(f"{left[0]}: could not be deleted: make it and its folder writable")


def show(config: CkptPruneConfig, root: Path, items: list["Item"], left: list[Path]) -> None:
    """Print the table."""
    from mlm.util.terminal import add_row, console, format_bytes, table

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


PRUNE = Command(
    words=("ckpt", "prune"),
    spec=CkptPruneConfig,
    target="mlm.cli.ckpt.prune:run",
    positional=("ckpt",),
    summary="delete old checkpoints of a run",
    about=(
        "Keeps the newest whole checkpoints, multiples of keep_every, and the one `latest` names, and "
        "clears up after killed saves. A damaged checkpoint never counts as kept (those that count are "
        "read to the last byte): it is deleted when keep_last whole ones are newer. Rejected while a run "
        "uses the folder."
    ),
    examples=(
        (
            "List the checkpoints that pruning would delete",
            "mlm ckpt prune runs/shakespeare keep_last=1 --dry-run",
        ),
        ("Every ten thousandth, and the last", "mlm ckpt prune runs/longer keep_last=1 keep_every=10000"),
    ),
)
