"""Cutting inputs into shards, and small shards into groups: what tasks work on.

How an input is cut decides nothing but who reads what: the documents of all shards, one after the other, are
those of the inputs in their order.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mlm.corpus.read.finding import Found, find_all, find_inputs, search
from mlm.corpus.read.formats import kind_of
from mlm.corpus.read.hub import HUB, hub_shards
from mlm.corpus.read.records import Input, Shard
from mlm.corpus.read.tables import row_ranges

__all__ = ["Found", "Input", "Shard", "cut", "find_all", "find_inputs", "group", "kind_of", "search"]

OPENING = 1 << 12
"""Bytes of text that take about as long to read as a file takes to open."""


def cut(inputs: Iterable[Input], shard_bytes: int) -> list[Shard]:
    """The shards of the inputs in corpus order, at least one for each input.

    Uncompressed .jsonl is cut every `shard_bytes` bytes (a line belongs where its first byte lies), Parquet
    where row groups begin; a .txt or compressed file is one shard. Raises UserError.
    """
    assert shard_bytes > 0, shard_bytes
    return [shard for item in inputs for shard in shards_of(item, shard_bytes)]


def group(inputs: Iterable[Input], shards: Sequence[Shard], shard_bytes: int) -> tuple[int, ...]:
    """Begins of groups of neighbouring shards, then the number of shards: each group is a task.

    Small files share a task, up to a quarter of `shard_bytes`, so that the number of tasks grows with the
    bytes of the input and not with its files. A group lies in one part.
    """
    sizes, many = {item.path: item.bytes for item in inputs}, dict[str, int]()
    for shard in shards:
        many[shard.path] = many.get(shard.path, 0) + 1
    bounds, held = [0], 0
    for i, shard in enumerate(shards):
        # what a Hub's shard holds is not known
        size = shard_bytes if shard.kind == "hub" else max(OPENING, sizes[shard.path] // many[shard.path])
        if i and (held + size > shared_bytes(shard_bytes) or shard.split != shards[i - 1].split):
            bounds.append(i)
            held = 0
        held += size
    return (*bounds, len(shards))


def shared_bytes(shard_bytes: int) -> int:
    """Most bytes of a task that is made of several shards."""
    return shard_bytes // 4


def shards_of(item: Input, shard_bytes: int) -> Iterator[Shard]:
    """The shards of one input."""
    kind = "hub" if item.path.startswith(HUB) else kind_of(Path(item.path))
    assert kind is not None, item.path
    if kind == "hub":
        ranges = [(index, index + 1) for index in range(hub_shards(item.path))]
    elif kind == "parquet":
        ranges = row_ranges(item.path, shard_bytes)
    else:
        step = shard_bytes if kind == "jsonl" else max(item.bytes, 1)
        ranges = [(begin, min(begin + step, item.bytes)) for begin in range(0, max(item.bytes, 1), step)]
    for begin, end in ranges:
        yield Shard(item.path, kind, begin, end, item.split)
