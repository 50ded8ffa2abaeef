"""Cutting inputs into shards: the pieces that tasks work on.

How an input is cut decides nothing but who reads what: the documents of all shards, one after the other, are
those of the inputs in their order.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from mlm.data.corpus.finding import Found, find_all, find_inputs, search
from mlm.data.corpus.formats import kind_of
from mlm.data.corpus.hub import HUB, hub_shards
from mlm.data.corpus.records import Input, Shard
from mlm.data.corpus.tables import row_ranges

__all__ = ["Found", "Input", "Shard", "cut", "find_all", "find_inputs", "kind_of", "search"]


def cut(inputs: Iterable[Input], shard_bytes: int) -> list[Shard]:
    """The shards of the inputs in corpus order, at least one for each input.

    Uncompressed .jsonl is cut every `shard_bytes` bytes (a line belongs where its first byte lies), Parquet
    where row groups begin; a .txt or compressed file is one shard. Raises UserError.
    """
    assert shard_bytes > 0, shard_bytes
    return [shard for item in inputs for shard in shards_of(item, shard_bytes)]


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
