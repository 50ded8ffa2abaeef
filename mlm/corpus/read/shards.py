"""Shards: the parts of the inputs that tasks process, and the digests that identify a build's inputs.

The division does not change the output: shards in order hold the documents of the inputs in order.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlm.corpus.read.encoding import AUTO, UTF_8, codec_of, detect
from mlm.corpus.read.finding import TEXTS, kind_of
from mlm.corpus.read.records import Input, InputShard
from mlm.corpus.read.tables import HUB, HubSource, open_hub, row_ranges
from mlm.data.streams import DamagedError, blocks, readable
from mlm.util.errors import UserError
from mlm.util.files import digest_file
from mlm.util.object_store import is_stored, list_objects
from mlm.util.terminal import progress_bar

OPENING = 1 << 12
"""Bytes of text that take as long to read as a file takes to open."""
SHARED_PART = 4
"""Small files share a task of up to shard_bytes / SHARED_PART bytes."""
TEXT_END = b"<|endoftext|>"
"""A line of a .txt file that ends a document."""


def split_inputs(inputs: Iterable[Input], shard_bytes: int) -> list[InputShard]:
    """Split the inputs into shards in corpus order, at least one for each input.

    Uncompressed .jsonl in UTF-8 is split every `shard_bytes` bytes (a line belongs to its first byte),
    Parquet where row groups begin; any other file is one shard. Raises UserError.
    """
    shards = list[InputShard]()
    for item in inputs:
        kind = "hub" if item.path.startswith(HUB) else kind_of(Path(item.path))
        assert kind is not None, item.path
        if kind == "hub":
            count = int(open_hub(HubSource.of(item.path))[1].num_shards)  # that can be read independently
            ranges = [(index, index + 1) for index in range(count)]
        elif kind == "parquet":
            ranges = row_ranges(item.path, shard_bytes)
        else:
            step = shard_bytes if kind == "jsonl" and item.encoding == UTF_8 else max(item.bytes, 1)
            ranges = [(begin, min(begin + step, item.bytes)) for begin in range(0, max(item.bytes, 1), step)]
        shards += (InputShard(item, kind, begin, end) for begin, end in ranges)
    return shards


def group(shards: Sequence[InputShard], shard_bytes: int) -> tuple[int, ...]:
    """Return starts of groups of neighbouring shards, then the number of shards: each group is a task.

    Small files share a task, so that the number of tasks grows with the bytes of the input, not with files. A
    group belongs to one part.
    """
    count, bounds, filled = Counter(shard.path for shard in shards), [0], 0
    for i, shard in enumerate(shards):
        # The size of a Hub dataset's shard is unknown.
        size = shard_bytes if shard.kind == "hub" else max(OPENING, shard.input.bytes // count[shard.path])
        is_part_end = i and shard.input.split != shards[i - 1].input.split
        if is_part_end or (i and filled + size > shard_bytes // SHARED_PART):
            bounds.append(i)
            filled = 0
        filled += size
    return (*bounds, len(shards))


def with_digests(inputs: Sequence[Input], encoding: str) -> tuple[Input, ...]:
    """Return the inputs with content digests and encodings; Hub datasets have a digest already.

    Raises UserError.
    """
    digested = list[Input]()
    with progress_bar("input", sum(item.bytes for item in inputs), in_bytes=True) as advance:
        for item in inputs:
            if not item.digest:
                state = state_of(item.path)
                with readable(item.path):
                    digest = digest_file(Path(item.path), advance)
                item = replace(item, digest=digest, state=state, bytes=state[0])
            item = with_encoding(item, encoding)
            if item.state:
                check_unchanged(item)
            digested.append(item)
    return tuple(digested)


def with_encoding(item: Input, encoding: str) -> Input:
    """Return an input with the encoding of `encoding=`, or the detected one. Raises UserError."""
    kind = (kind_of(Path(item.path)) or "").partition(".")[0]
    if item.path.startswith(HUB) or kind not in TEXTS:
        return item
    if encoding != AUTO:
        return replace(item, encoding=codec_of(encoding))
    try:
        return replace(item, encoding=detect(blocks(item.path), item.path, is_page=kind == "html"))
    except DamagedError:
        return item  # the reader reports the damage


def describe_encodings(inputs: Iterable[Input]) -> str:
    """Name the first files of each encoding except UTF-8; "" if all are UTF-8."""
    names: dict[str, list[str]] = {}
    for item in inputs:
        if item.encoding != UTF_8:
            names.setdefault(item.encoding, []).append(item.name)
    return "; ".join(
        f"{', '.join(files[:3])}{f' and {len(files) - 3} more' if len(files) > 3 else ''} read as {encoding}"
        for encoding, files in names.items()
    )


def input_lines(inputs: Sequence[Input]) -> bytes:
    """Return a JSON line with name, size and digest of each input, and its encoding if not UTF-8."""
    lines = list[dict[str, Any]]()
    for item in inputs:
        lines.append({"name": item.name, "bytes": item.bytes, "digest": item.digest})
        if item.encoding != UTF_8:
            lines[-1]["encoding"] = item.encoding
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def state_of(path: str) -> tuple[int, int, int]:
    with readable(path):
        status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def check_unchanged(item: Input) -> None:
    """Raise UserError if an input has changed since it was digested."""
    if is_stored(item.path):
        is_same = [stored.digest for stored in list_objects(item.path)] == [item.digest]
    else:
        is_same = not item.state or state_of(item.path) == item.state
    if not is_same:
        raise UserError(
            f"input {item.path} changed while the build read it; build again once nothing writes to it"
        )
