"""The plan of a build: its stages, the folder of each, the markers of finished tasks, the files of each task.

The names of the stages' folders contain the digest of everything that determines a build, so their files are
from an identical build. A task writes its marker last and atomically, so files with a marker are complete and
a killed build continues.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlm.corpus.config import DataBuildConfig
from mlm.corpus.read.records import InputShard
from mlm.data.config import SPLITS
from mlm.data.corpus_files import TOKENIZER, parse_split
from mlm.data.tokenizer import Tokenizer
from mlm.util.files import digest_bytes, write_atomic

VERSION = 4  # of what the stages write
EVALUATION = "evaluation.jsonl"
PART_BYTES, MOST_PARTS = 1 << 37, 16
"""Bytes of input for each part of a band's keys, and most parts: each task of `match` reads all keys."""
MOST_RANGES = 256
"""Most tasks of `link`: each opens all files of `match`."""


@dataclass(frozen=True)
class BuildStage:
    """A step of a build: independent tasks that read the preceding stages."""

    name: str
    tasks: int
    folder: Path
    """Folder of the tasks' files."""

    def marker(self, task: int) -> Path:
        return self.folder / f"{task:05d}.done.json"

    def is_done(self, task: int) -> bool:
        """True if a task has written its marker, and its files have the sizes in it."""
        try:
            sizes = json.loads(self.marker(task).read_bytes())["files"]
            return all((self.folder / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError):
            return False

    def finish(self, task: int, counts: dict[str, Any], files: Sequence[Path] = ()) -> None:
        """Mark a task as done, with its counts and the sizes of its files. Raises OSError."""
        sizes = {file.name: file.stat().st_size for file in files}
        write_atomic(self.marker(task), json.dumps({"counts": counts, "files": sizes}).encode())

    def files(self) -> list[Path]:
        markers = (json.loads(self.marker(task).read_bytes()) for task in range(self.tasks))
        return [self.folder / name for marker in markers for name in marker["files"]]

    def counts(self) -> list[dict[str, Any]]:
        return [json.loads(self.marker(task).read_bytes())["counts"] for task in range(self.tasks)]

    def total(self) -> Counter[str]:
        """Add up the counts of all tasks, in the order of their first occurrence."""
        total = Counter[str]()
        for counts in self.counts():
            total.update(counts)
        return total


@dataclass(frozen=True)
class BuildPlan:
    """A build: its settings, stages and tasks."""

    config: DataBuildConfig
    work: Path
    tokenizer: str
    """Digest of tokenizer.json."""
    special: tuple[int, int | None]
    """Tokens that end a document and begin a sequence."""
    evaluation: str | None
    """Digest of the evaluation texts to keep out, or None."""
    parts: tuple[str, ...]
    """Parts of the corpus: of the input folder, or with a share."""
    is_divided: bool
    """True if documents are assigned to parts; False if the input folder has parts."""
    stages: dict[str, BuildStage]
    """By name, in order."""
    shards: Mapping[int, Sequence[InputShard]]
    """Shards of each task of the stages `clean` and `tokenise`."""
    held_out: tuple[float, ...] | None = None
    """Shares of each document for `parts` after train, as passages; None keeps documents whole."""

    def of_task(self, task: int) -> "BuildPlan":
        """Return the plan with the shards of one task, so that a worker's memory stays constant."""
        return replace(self, shards={task: self.shards[task]} if task in self.shards else {})

    def load_tokenizer(self) -> Tokenizer:
        return _load_tokenizer(self.work / TOKENIZER, self.tokenizer, *self.special)


def make_plan(
    config: DataBuildConfig,
    work: Path,
    shards: Sequence[InputShard],
    bounds: Sequence[int],
    identity: dict[str, Any],
) -> BuildPlan:
    """Plan a build.

    `bounds` are the first shard of each task, then the number of shards; `identity` is everything that
    determines the output.
    """
    input_parts = {shard.input.split for shard in shards if shard.input.split}
    shares = dict(zip(SPLITS, parse_split(config.split), strict=True))
    parts = tuple(part for part in SPLITS if (part in input_parts if input_parts else shares[part] > 0))
    num_tasks = len(bounds) - 1
    tasks = {"clean": num_tasks}
    if config.dedup.enabled:
        key_parts = min(MOST_PARTS, 1 + sum(shard.end - shard.begin for shard in shards) // PART_BYTES)
        tasks |= {"match": config.dedup.bands * key_parts, "link": min(num_tasks, MOST_RANGES), "group": 1}
        tasks |= {"verify": num_tasks, "gather": 1}
    tasks |= {"tokenise": num_tasks, "merge": len(parts)}
    ranges = [(shard.kind, shard.begin, shard.end) for shard in shards]
    digest = digest_bytes(json.dumps([VERSION, identity, ranges, list(bounds)]).encode())
    name = digest.partition(":")[2][:16]
    stages = {stage: BuildStage(stage, count, work / f"{stage}-{name}") for stage, count in tasks.items()}
    return BuildPlan(
        config,
        work,
        tokenizer=identity["tokenizer"],
        special=(identity["eod_id"], identity["bos_id"]),
        evaluation=identity["evaluation_texts"],
        parts=parts,
        is_divided=identity["split"] is not None,
        stages=stages,
        shards={task: shards[begin:end] for task, (begin, end) in enumerate(pairwise(bounds))},
    )


@lru_cache(maxsize=1)
def _load_tokenizer(path: Path, _digest: str, eod: int, bos: int | None) -> Tokenizer:
    return Tokenizer.load(path, eod=eod, bos=bos)


def shard_bytes(total: int) -> int:
    """Return the bytes of a shard for `total` bytes of input: 8 MiB to 1 GiB, for about 4,096 shards.

    It never changes the output.
    """
    return min(1 << 30, max(1 << 23, total // 4096))
