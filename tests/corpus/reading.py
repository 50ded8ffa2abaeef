"""Reading files whole, as the tests of every format do."""

from dataclasses import dataclass, field
from pathlib import Path

from mlm.corpus.read.finding import search
from mlm.corpus.read.read import read_shard
from mlm.corpus.read.records import BadRecordError, Document, InputShard
from mlm.corpus.read.shards import split_inputs, with_encoding


@dataclass
class Outcome:
    documents: list[Document] = field(default_factory=list)
    rejected: list[BadRecordError] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        return [document.text for document in self.documents]

    @property
    def problems(self) -> list[tuple[str, str]]:
        """File name with line, and rule."""
        return [(str(problem.location).rpartition("/")[2], problem.rule) for problem in self.rejected]


def read(
    path: Path | str,
    *,
    shard_bytes: int = 1 << 20,
    text_key: str = "text",
    max_bytes: int = 1 << 20,
    encoding: str = "utf-8",
) -> Outcome:
    shards = split_inputs([with_encoding(item, encoding) for item in search(str(path)).inputs], shard_bytes)
    return read_shards(shards, text_key=text_key, max_bytes=max_bytes)


def read_shards(shards: list[InputShard], *, text_key: str, max_bytes: int) -> Outcome:
    outcome = Outcome()
    for shard in shards:
        outcome.documents += read_shard(
            shard,
            text_key=text_key,
            max_bytes=max_bytes,
            reject=outcome.rejected.append,
        )
    return outcome


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
