"""The plan of a build: its stages, the folder of each, the markers of finished tasks, the files of each task.

The folders of stages are named after the digest of all that a build is a function of: what is in them was
made by an equal build. The marker of a task is written last and atomically: where it is, the files are
complete. So a build that was killed continues.
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
"""Input for a part of a band's keys, each of which reads them all, and most parts."""
MOST_RANGES = 256
"""Most tasks of `link`, each of which opens all files of `match`."""


@dataclass(frozen=True)
class BuildStage:
    """One step of a build: independent tasks that read the stages before it."""

    name: str
    tasks: int
    folder: Path
    """Folder of its tasks' files."""

    def marker(self, task: int) -> Path:
        return self.folder / f"{task:05d}.done.json"

    def is_done(self, task: int) -> bool:
        """True if a task has left its marker, and its files have the sizes in it."""
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
    """A build, as the command and its tasks see it."""

    config: DataBuildConfig
    work: Path
    tokenizer: str
    """Digest of tokenizer.json."""
    special: tuple[int, int | None]
    """Tokens that end a document and begin a sequence."""
    evaluation: str | None
    """Digest of the evaluation texts to keep out, or None."""
    parts: tuple[str, ...]
    """Parts of the corpus: the input folder's, or the ones with a share."""
    is_divided: bool
    """True if documents are assigned to parts; False if the input folder has parts."""
    stages: dict[str, BuildStage]
    """By name, in their order."""
    shards: Mapping[int, Sequence[InputShard]]
    """Shards of each task of the stages `clean` and `tokenise`."""
    held_out: tuple[float, ...] | None = None
    """Shares of each document for `parts` after train, as passages; None keeps documents whole."""

    def of_task(self, task: int) -> "BuildPlan":
        """Return the plan for a worker: the memory of one does not grow with the files of the build."""
        return replace(self, shards={task: self.shards[task]} if task in self.shards else {})

    def load_tokenizer(self) -> Tokenizer:
        return _load_tokenizer(self.work / TOKENIZER, self.tokenizer, *self.special)


def make_plan(
    config: DataBuildConfig,
    work: Path,
    shards: Sequence[InputShard],
    bounds: Sequence[int],
    made_of: dict[str, Any],
) -> BuildPlan:
    """Plan a build.

    `bounds` are the first shard of each task, then the number of shards; `made_of` is all that the output is
    a function of.
    """
    given = {shard.input.split for shard in shards if shard.input.split}
    shares = dict(zip(SPLITS, parse_split(config.split), strict=True))
    parts = tuple(part for part in SPLITS if (part in given if given else shares[part] > 0))
    many = len(bounds) - 1
    tasks = {"clean": many}
    if config.dedup.enabled:
        of_keys = min(MOST_PARTS, 1 + sum(shard.end - shard.begin for shard in shards) // PART_BYTES)
        tasks |= {"match": config.dedup.bands * of_keys, "link": min(many, MOST_RANGES), "group": 1}
        tasks |= {"verify": many, "gather": 1}
    tasks |= {"tokenise": many, "merge": len(parts)}
    ranges = [(shard.kind, shard.begin, shard.end) for shard in shards]
    identity = digest_bytes(json.dumps([VERSION, made_of, ranges, list(bounds)]).encode())
    name = identity.partition(":")[2][:16]
    stages = {stage: BuildStage(stage, count, work / f"{stage}-{name}") for stage, count in tasks.items()}
    return BuildPlan(
        config,
        work,
        tokenizer=made_of["tokenizer"],
        special=(made_of["eod_id"], made_of["bos_id"]),
        evaluation=made_of["evaluation_texts"],
        parts=parts,
        is_divided=made_of["split"] is not None,
        stages=stages,
        shards={task: shards[begin:end] for task, (begin, end) in enumerate(pairwise(bounds))},
    )


@lru_cache(maxsize=1)
def _load_tokenizer(path: Path, _digest: str, eod: int, bos: int | None) -> Tokenizer:
    return Tokenizer.load(path, eod=eod, bos=bos)


def shard_bytes(total: int) -> int:
    """Return the size of a shard for `total` bytes of input: 8 MiB to 1 GiB, about 4,096 shards between.

    It decides how the work is divided and never the output.
    """
    return min(1 << 30, max(1 << 23, total // 4096))
