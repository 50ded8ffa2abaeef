"""Stage `merge`: the shards of a part, one after another, as the .bin/.idx of the corpus."""

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from mlm.corpus.stages.clean import TEXT
from mlm.corpus.stages.markers import Advance, write_marker
from mlm.corpus.stages.plan import Plan
from mlm.data.corpus_files import origins_of
from mlm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from mlm.files.atomic import fsync_directory, write_atomic


def run(plan: Plan, task: int) -> None:
    """Merge one part. The result waits in the work folder until all parts are there."""
    stage, tokenised = plan.stages["merge"], plan.stages["tokenise"]
    part = plan.parts[task]
    advance = Advance(stage.folder, task)
    names, files = [part], list[Path]()
    if plan.config.keep_ids:
        names.append(origins_of(Path(part)).name)
    for name in names:
        suffix = name.removeprefix(part)
        shards = [tokenised.folder / f"{part}-{shard:05d}{suffix}" for shard in range(tokenised.tasks)]
        dtype = TEXT if suffix else token_dtype(plan.load_tokenizer().vocab_size)
        with IndexedWriter(stage.folder / name, dtype) as writer:
            for shard in shards:
                found = IndexedDataset(shard, allow_empty=True)
                writer.append(found)
                advance(0 if suffix else found.num_tokens)
        files += [bin_path(stage.folder / name), idx_path(stage.folder / name)]
    write_marker(stage.folder, task, {}, files)


def publish(plan: Plan, out: Path) -> list[str]:
    """Move the merged files into the corpus folder; their names are returned. Raises OSError.

    An .idx vouches for its .bin, so it comes second.
    """
    merged = plan.stages["merge"].folder
    prefixes = [Path(part) for part in plan.parts]
    prefixes += [origins_of(prefix) for prefix in prefixes] if plan.config.keep_ids else []
    names = [path(prefix).name for prefix in prefixes for path in (bin_path, idx_path)]
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
