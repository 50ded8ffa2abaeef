"""Shards: the parts of the inputs that tasks work on, and the digests that identify a build's inputs.

How an input is divided decides nothing but who reads what: the documents of all shards, one after the other,
are those of the inputs in their order.

An input of one text (the only document of a .txt) cannot be divided by documents. It is split into
consecutive parts, train first, at the ends of paragraphs, else of lines, else of words. Text of one part then
occurs in no other, and nothing ends within a part that does not end in the text.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

from mlm.corpus.read.finding import kind_of
from mlm.corpus.read.records import Input, InputShard
from mlm.corpus.read.streams import DamagedError, blocks
from mlm.corpus.read.tables import HUB, HubSource, open_hub, row_ranges
from mlm.data.config import SPLITS
from mlm.data.records import readable
from mlm.util.errors import UserError
from mlm.util.files import digest_file
from mlm.util.object_store import is_stored, list_objects
from mlm.util.terminal import progress_bar

OPENING = 1 << 12
"""Bytes of text that take about as long to read as a file takes to open."""
SHARED_PART = 4
"""Several small files share a task up to this part of a shard's bytes."""
TEXT_END = b"<|endoftext|>"
"""A line of a .txt file with just this ends a document."""
SEPARATOR = re.compile(rb"(?m)^[ \t\r\f\v]*<\|endoftext\|>[ \t\r\f\v]*$")
HELD_OUT = 4096
"""Minimum bytes of validation and of test, some thousand tokens; of a short text a tenth."""
SEARCHED = 1 << 16
"""Bytes searched for an end before a split."""


def split_inputs(inputs: Iterable[Input], shard_bytes: int) -> list[InputShard]:
    """Split the inputs into shards in corpus order, at least one for each input.

    Uncompressed .jsonl is split every `shard_bytes` bytes (a line belongs to its first byte), Parquet
    where row groups begin; a .txt or compressed file is one shard. Raises UserError.
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
            step = shard_bytes if kind == "jsonl" else max(item.bytes, 1)
            ranges = [(begin, min(begin + step, item.bytes)) for begin in range(0, max(item.bytes, 1), step)]
        shards += (InputShard(item, kind, begin, end, item.split) for begin, end in ranges)
    return shards


def group(shards: Sequence[InputShard], shard_bytes: int) -> tuple[int, ...]:
    """Return starts of groups of neighbouring shards, then the number of shards: each group is a task.

    Small files share a task, so that the number of tasks grows with the bytes of the input and not with its
    files. A group belongs to one part.
    """
    count, bounds, held = Counter(shard.path for shard in shards), [0], 0
    for i, shard in enumerate(shards):
        # the size of a Hub's shard is not known
        size = shard_bytes if shard.kind == "hub" else max(OPENING, shard.input.bytes // count[shard.path])
        if i and (held + size > shard_bytes // SHARED_PART or shard.split != shards[i - 1].split):
            bounds.append(i)
            held = 0
        held += size
    return (*bounds, len(shards))


def parts_of_text(
    inputs: Sequence[Input], shares: Sequence[float], max_bytes: int
) -> list[InputShard] | None:
    """Return the parts of the input if it is one text and several parts are wanted, else None.

    Raises UserError for a file that cannot be read. A part above `max_bytes` is rejected where it is read.
    """
    wanted = [(part, share) for part, share in zip(SPLITS, shares, strict=True) if share > 0]
    kind = kind_of(Path(inputs[0].path)) or ""
    if len(inputs) != 1 or inputs[0].split or len(wanted) < 2 or not kind.startswith("txt"):
        return None
    content = bytearray()
    try:
        for block in blocks(inputs[0].path):
            content += block
            if len(content) > 2 * max_bytes:
                return None
    except DamagedError:
        return None  # reading it reports the damage
    total = len(content)
    if not total or SEPARATOR.search(content):
        return None
    held_out = [max(share * total, min(HELD_OUT, total / 10)) for _, share in wanted[1:]]
    bounds = [0]
    for rest in list(accumulate(reversed(held_out)))[::-1]:
        bounds.append(split_before(content, round(total - rest), bounds[-1]))
    bounds.append(total)
    packing = kind.removeprefix("txt")
    return [
        InputShard(inputs[0], f"slice{packing}", begin, end, part)
        for (part, _), (begin, end) in zip(wanted, pairwise(bounds), strict=True)
    ]


def split_before(content: bytearray, target: int, least: int) -> int:
    """Return the last position in (least, target] where a paragraph, a line or a word ends."""
    begin = max(least, target - SEARCHED)
    window = content[begin:target]
    for end in (rb"\n[ \t\r]*\n", rb"\n", rb"\s"):
        if ends := list(re.finditer(end, window)):
            return begin + ends[-1].end()
    at = len(window)
    while at and window[at - 1] & 0xC0 == 0x80:  # not inside a letter
        at -= 1
    return begin + max(0, at - 1) if at else target


def with_digests(inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Return the inputs with content digests; a Hub dataset has one already. Raises UserError."""
    digested = list[Input]()
    with progress_bar("input", sum(item.bytes for item in inputs), in_bytes=True) as advance:
        for item in inputs:
            if not item.digest:
                state = state_of(item.path)
                with readable(item.path):
                    digest = digest_file(Path(item.path), advance)
                item = replace(item, digest=digest, state=state, bytes=state[0])
                check_unchanged(item)
            digested.append(item)
    return tuple(digested)


def input_lines(inputs: Sequence[Input]) -> bytes:
    """Return a line of JSON with name, size and digest of each input."""
    lines = ({"name": item.name, "bytes": item.bytes, "digest": item.digest} for item in inputs)
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def state_of(path: str) -> tuple[int, int, int]:
    with readable(path):
        status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def check_unchanged(item: Input) -> None:
    """Raise UserError if an input was written to since it was digested."""
    if is_stored(item.path):
        is_same = [stored.digest for stored in list_objects(item.path)] == [item.digest]
    else:
        is_same = not item.state or state_of(item.path) == item.state
    if not is_same:
        raise UserError(
            f"input {item.path} changed while the build read it; build again once nothing writes to it"
        )
