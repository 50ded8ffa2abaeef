"""`mlm ckpt prune`: delete old checkpoints of a run, and what killed saves left."""

from contextlib import nullcontext

from mlm.checkpoint.native.folders import locate
from mlm.checkpoint.native.format import CheckpointError
from mlm.checkpoint.native.pruning import delete, list_items
from mlm.cli.ckpt.settings import CkptPruneConfig
from mlm.tracking.history import FILE_NAME, diverged_since
from mlm.util.errors import UserError
from mlm.util.lock import single_writer
from mlm.util.terminal import add_row, console, format_bytes, table


def run(config: CkptPruneConfig) -> None:
    """Delete checkpoints, or with dry_run list those that would be deleted.

    Raises UserError when the folder is in use or has no checkpoint, CheckpointError when something could not
    be deleted.
    """
    root, is_single = locate(config.ckpt)
    if is_single:
        raise UserError(f"ckpt={config.ckpt}: is one checkpoint; set ckpt=… to its run directory")
    with nullcontext() if config.dry_run else single_writer(root, setting="ckpt"):
        try:
            bad_step = diverged_since(root.parent / FILE_NAME)
            items = list_items(root, keep_last=config.keep_last, keep_every=config.keep_every, since=bad_step)
            undeleted = [] if config.dry_run else delete(root, items)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or root}: {error.strerror}: make it readable and writable"
            ) from error
    deletion = "would be deleted" if config.dry_run else "deleted"
    rows = table(f"ckpt prune · {root}", "", "size#", "", "")
    for item in items:
        outcome = "not deleted" if item.path in undeleted else deletion if item.is_outdated else "kept"
        add_row(rows, item.path.name, format_bytes(item.bytes), outcome, item.description)
    out = console()
    out.print(rows)
    freed = sum(item.bytes for item in items if item.is_outdated and item.path not in undeleted)
    out.print(f"{format_bytes(freed)} {'would be ' if config.dry_run else ''}freed")
    damaged = [item for item in items if item.description.startswith("damaged") and not item.is_outdated]
    if damaged:
        out.print(f"damaged, kept and not counted: {len(damaged)}. Restore from a copy, or delete by hand")
    if undeleted:
        raise CheckpointError(f"{undeleted[0]}: could not be deleted: make it and its folder writable")
