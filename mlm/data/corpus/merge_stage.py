"""Stage `merge`: the shards of a part, one after another, as the .bin/.idx of the corpus."""

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from mlm.data.corpus.markers import Advance, write_marker
from mlm.data.corpus.plan import Plan
from mlm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from mlm.files import fsync_directory, write_atomic


def run(plan: Plan, task: int) -> None:
    """Merge one part. The result waits in the work folder until all parts are there."""
    stage, tokenised = plan.stages["merge"], plan.stages["tokenise"]
    part = plan.parts[task]
    dtype = token_dtype(plan.load_tokenizer().vocab_size)
    advance = Advance(stage.folder, task)
    prefix = stage.folder / part
    with IndexedWriter(prefix, dtype) as writer:
        for shard in range(tokenised.tasks):
            tokens = IndexedDataset(tokenised.folder / f"{part}-{shard:05d}", allow_empty=True)
            writer.append(tokens)
            advance(tokens.num_tokens)
    write_marker(stage.folder, task, {}, [bin_path(prefix), idx_path(prefix)])


def publish(plan: Plan, out: Path) -> list[str]:
    """Move the merged files into the corpus folder; their names are returned. Raises OSError.

    An .idx vouches for its .bin, so it comes second.
    """
    merged = plan.stages["merge"].folder
    names = [path(Path(part)).name for part in plan.parts for path in (bin_path, idx_path)]
    for name in names:
        move(merged / name, out / name)
    fsync_directory(out)
    return names


def move(source: Path, target: Path) -> None:
    """Rename a file; to another file system, copy it."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise

        def copy(f: BinaryIO) -> None:
            with open(source, "rb") as content:
                shutil.copyfileobj(content, f, 1 << 22)

        write_atomic(target, copy)
