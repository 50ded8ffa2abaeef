"""Datasets of the Hugging Face Hub, streamed by the library `datasets`: only its small cache is stored.

No code of a dataset runs: `datasets` 4 and later refuse a dataset that needs a script. Beyond that, only
those of its formats are taken that hold text (FORMATS).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs, urlencode

from mlm.corpus.read.records import BadRecordError, Document, Intake, Place, Shard
from mlm.errors import UserError
from mlm.extras import load_extra

HUB = "hub:"
FORMATS = ("arrow", "csv", "json", "parquet", "text")
NAME = re.compile(r"[\w.-]+/[\w.-]+")
LOCAL_COPY = "check name and network, or download it and give the files as input"


@dataclass(frozen=True)
class HubSource:
    """What the user asks for."""

    path: str
    """hub:OWNER/NAME"""
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def pinned(self, commit: str) -> str:
        """The path of a shard: all that another machine needs to read the same rows."""
        fields = {"revision": commit, "config": self.config, "split": self.split}
        return f"{self.path}?{urlencode({key: value for key, value in fields.items() if value is not None})}"

    @classmethod
    def of(cls, pinned: str) -> "HubSource":
        """The inverse of `pinned`."""
        path, _, query = pinned.partition("?")
        fields = {key: values[0] for key, values in parse_qs(query).items()}
        return cls(path, fields.get("config"), fields["split"], fields["revision"])


def find_hub(source: HubSource) -> tuple[str, int, str]:
    """Pinned path, size in bytes (0 where unknown) and digest of a dataset: its commit, so that it cannot
    change between two stages. Raises UserError."""
    if not NAME.fullmatch(source.path.removeprefix(HUB)):
        raise UserError(f"input={source.path} is no Hub dataset: write hub:OWNER/NAME")
    builder, _ = open_hub(source)
    commit = str(builder.hash)
    splits = builder.info.splits or {}
    size = splits[source.split].num_bytes if source.split in splits else 0
    return source.pinned(commit), max(int(size or 0), 0), f"hub:{commit}:{source.config}:{source.split}"


def hub_shards(pinned: str) -> int:
    """How many files, or the like, a dataset can be read in independently. Raises UserError."""
    return int(open_hub(HubSource.of(pinned))[1].num_shards)


@lru_cache(maxsize=4)
def open_hub(source: HubSource) -> tuple[Any, Any]:
    """The builder of a dataset, and its split as a stream. Raises UserError."""
    datasets = load_extra("datasets", f"input={source.path}")
    # the prefix keeps `datasets` from taking a folder of the same name for it
    name = f"hf://datasets/{source.path.removeprefix(HUB)}"
    with hub_is_told(source):
        builder = datasets.load_dataset_builder(name, source.config, revision=source.revision)
        if builder.name not in FORMATS:
            raise UserError(
                f"input={source.path} holds {builder.name}, not text in one of {', '.join(FORMATS)}: "
                f"convert it to .jsonl"
            )
        return builder, builder.as_streaming_dataset(split=source.split)


@contextmanager
def hub_is_told(source: HubSource) -> Iterator[None]:
    """Turns whatever `datasets` raises into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the network, of the Hub, of a dozen libraries: no common base
        reason = " ".join(str(error).split())[:300]
        setting = f"input={source.path} hub_config={source.config} hub_split={source.split}"
        raise UserError(f"{setting}: {type(error).__name__}: {reason}: {LOCAL_COPY}") from error


def read_hub(shard: Shard, intake: Intake) -> Iterator[Document]:
    """Documents of one of the dataset's own shards; rows are counted from its beginning."""
    source = HubSource.of(shard.path)
    _, stream = open_hub(source)
    unit = f"shard {shard.begin} row "
    with hub_is_told(source):
        if stream.features is not None and all(key in stream.features for key in intake.keys):
            stream = stream.select_columns(intake.keys)  # so that nothing else is decoded
        rows = iter(stream.shard(num_shards=stream.num_shards, index=shard.begin))
    row = 0
    while True:
        place = Place(source.path, row + 1, unit=unit)
        try:
            with hub_is_told(source):
                record = next(rows, None)
        except UserError as error:
            if not is_damage(error.__cause__):
                raise
            intake.damaged(place, error.__cause__)
            return
        if record is None:
            return
        try:
            document = intake.document(record, place)
        except BadRecordError as fault:
            intake.reject(place, fault)
        else:
            yield document
        row += 1


def is_damage(error: BaseException | None) -> bool:
    """Whether a file of the dataset is at fault, not the way to it."""
    # OSError and what derives from it is the network's; a row that cannot be decoded is a ValueError
    arrow = load_extra("pyarrow", "hub").ArrowException
    return isinstance(error, ValueError | EOFError | arrow) and not isinstance(error, OSError)
