"""The plan of a build: its inputs, its stages, and the folder of each.

The plan is a file in the work folder, so that a task on another machine can read it: a line of JSON for the
build, and one for each task with the files that it reads. A task parses its own alone: its memory does not
grow with the files of the build. A stage's folder is named after the digest of all that its output is a
function of: its contents were made by equal stages from equal inputs, whichever build made them, and can be
reused.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from mlm.config.build import from_dict, to_dict
from mlm.corpus.config import DataBuildConfig
from mlm.corpus.read.records import Input, Shard
from mlm.data.corpus_files import SPLITS, parse_split
from mlm.data.tokenizer import Tokenizer
from mlm.util.atomic import digest_bytes, write_atomic
from mlm.util.errors import CorruptFileError

VERSION = 2  # of what the stages write; part of every stage's digest
PLAN = "plan.jsonl"
TOKENIZER = "tokenizer.json"
EVALUATION = "evaluation.jsonl"
MAX_LINE_BYTES = 1 << 30
READERS = ("clean", "tokenise")
"""Stages whose tasks have files of their own."""
NAME_DIGITS = 16  # hexadecimal digits of a digest in a folder's name


@dataclass(frozen=True)
class Stage:
    """One step of a build: independent tasks that read the stages before it."""

    name: str
    tasks: int
    folder: Path
    """Folder of its tasks' files."""


@dataclass(frozen=True)
class Outline:
    """Stages and parts of a whole build; a task is told them, and reads a part of its files."""

    stages: dict[str, Stage]
    """By name, in their order."""
    parts: tuple[str, ...]
    """Of the corpus: those of the input folder, or those with a share."""
    is_divided: bool
    """True if documents are assigned to parts; False if the input folder has parts."""


@dataclass(frozen=True)
class Plan:
    """A build, as its tasks see it. All of it is a function of configuration and inputs."""

    config: DataBuildConfig
    work: Path
    inputs: tuple[Input, ...]
    """Files of the build; in a task those that it reads, if any."""
    shards: tuple[Shard, ...]
    """Of these inputs."""
    bounds: tuple[int, ...]
    """First shard of each task of the stages that read them, then the number of shards."""
    tokenizer: str
    """Digest of tokenizer.json."""
    evaluation: str | None
    """Digest of the evaluation texts to keep out, None where there are none."""
    told: Outline | None = None
    """In a task, what the plan says of the build, whose inputs it has not read."""

    @property
    def removes(self) -> bool:
        """True if documents are compared with each other."""
        return self.config.dedup.enabled or self.config.id_key is not None

    def shards_of(self, task: int) -> tuple[Shard, ...]:
        """The shards that a task of the stages `clean` and `tokenise` works on."""
        return self.shards[self.bounds[task] : self.bounds[task + 1]]

    def input_of(self, shard: Shard) -> Input:
        """The input that a shard is of."""
        return self._by_path[shard.path]

    @cached_property
    def _by_path(self) -> dict[str, Input]:
        return {item.path: item for item in self.inputs}

    @property
    def stages(self) -> dict[str, Stage]:
        """The stages by name, in their order."""
        return self.outline.stages

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the corpus."""
        return self.outline.parts

    @property
    def is_divided(self) -> bool:
        """True if documents are assigned to parts; False if the input folder has parts."""
        return self.outline.is_divided

    @cached_property
    def outline(self) -> Outline:
        """Stages and parts of the whole build."""
        if self.told is not None:
            return self.told
        given = {shard.split for shard in self.shards if shard.split}
        shares = dict(zip(SPLITS, parse_split(self.config.split), strict=True))
        parts = tuple(part for part in SPLITS if (part in given if given else shares[part] > 0))
        return Outline(self._stages(len(parts)), parts, not any(item.split for item in self.inputs))

    def _stages(self, parts: int) -> dict[str, Stage]:
        many = len(self.bounds) - 1
        tasks = {"clean": many}
        if self.removes:
            bands = self.config.dedup.bands if self.config.dedup.enabled else 0
            tasks |= {"match": bands + 1, "group": 1, "verify": many, "gather": 1}
        tasks |= {"tokenise": many, "merge": parts}
        stages, before = dict[str, Stage](), digest_bytes(b"")
        for name, count in tasks.items():
            made_of = json.dumps([VERSION, name, count, before, self._ingredients(name)], sort_keys=True)
            before = digest_bytes(made_of.encode())
            digest = before.partition(":")[2][:NAME_DIGITS]
            stages[name] = Stage(name, count, self.work / f"{name}-{digest}")
        return stages

    def _ingredients(self, stage: str) -> Any:
        """Everything a stage's output depends on other than the stages before it."""
        config = to_dict(self.config)
        match stage:
            case "clean":
                keys = (
                    "text_key",
                    "id_key",
                    "keep_ids",
                    "bad_input",
                    "max_document_bytes",
                    "normalise",
                    "filter",
                )
                signature = {
                    key: config["dedup"][key] for key in ("enabled", "ngram", "unit", "bands", "rows")
                }
                inputs = [(item.name, item.bytes, item.digest, item.split) for item in self.inputs]
                # a foreign shard is named by its file; where the folder lies does not matter
                shards = [(shard.kind, shard.begin, shard.end, shard.split) for shard in self.shards]
                counted = self.tokenizer if self.config.filter.min_tokens is not None else None
                return [{key: config[key] for key in keys}, signature, inputs, shards, self.bounds, counted]
            case "verify":
                return config["dedup"]["threshold"]
            case "tokenise":
                keys = ("split", "seed", "eod", "append_eod", "prepend_bos", "sentences", "decontaminate")
                return [{key: config[key] for key in keys}, self.tokenizer, self.evaluation]
            case _:
                return None

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, kept between the tasks of a process. Raises UserError, CorruptFileError."""
        return _load_tokenizer(self.work / TOKENIZER, self.tokenizer, self.config.eod)

    def save(self) -> Path:
        """Write the plan into the work folder; its path is returned. Raises OSError."""
        # The lines are made twice, so that they are never in memory together.
        ends = [*accumulate(map(len, self._task_lines()), initial=0)]
        head = {
            "config": to_dict(self.config),
            "ends": ends,
            "tokenizer": self.tokenizer,
            "evaluation": self.evaluation,
            "stages": [(stage.name, stage.tasks, stage.folder.name) for stage in self.stages.values()],
            "parts": self.parts,
            "is_divided": self.is_divided,
        }
        path = self.work / PLAN
        write_atomic(path, lambda f: f.writelines(chain([_line(head)], self._task_lines())))
        return path

    def _task_lines(self) -> Iterator[bytes]:
        for task in range(len(self.bounds) - 1):
            shards = self.shards_of(task)
            inputs = {shard.path: self.input_of(shard) for shard in shards}
            yield _line([[asdict(item) for item in inputs.values()], [asdict(shard) for shard in shards]])

    @classmethod
    def load(cls, path: Path, stage: str = "", task: int = 0) -> "Plan":
        """Return the plan in a work folder, as a task of a stage sees it. Raises CorruptFileError."""
        try:
            state = path.stat()
        except FileNotFoundError as error:
            raise CorruptFileError(f"{path} is missing: build again") from error
        try:
            plan, starts = _load_head(path, state.st_ino, state.st_size, state.st_mtime_ns)
            return plan.of_task(path, starts[task], task) if stage in READERS else plan
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            remedy = "delete the work folder and build again"
            raise CorruptFileError(f"{path} is not the plan of a build: {remedy}") from error

    def of_task(self, path: Path, start: int, task: int) -> "Plan":
        """Return this plan with the files of a task, whose line begins at byte `start`."""
        with open(path, "rb") as file:
            file.seek(start)
            inputs, shards = json.loads(file.readline(MAX_LINE_BYTES))
        return replace(
            self,
            inputs=tuple(Input(**item | {"state": tuple(item["state"])}) for item in inputs),
            shards=tuple(Shard(**shard) for shard in shards),
            bounds=(*(0,) * (task + 1), len(shards)),
        )


def _line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


@lru_cache(maxsize=1)
def _load_head(path: Path, *_: int) -> tuple[Plan, list[int]]:
    """Return the plan without files, and where the line of each task begins; read once in a process."""
    with open(path, "rb") as file:
        head = json.loads(file.readline(MAX_LINE_BYTES))
        begin = file.tell()
    stages = {name: _stage(path.parent, name, tasks, folder) for name, tasks, folder in head["stages"]}
    plan = Plan(
        config=from_dict(DataBuildConfig, head["config"]),
        work=path.parent,
        inputs=(),
        shards=(),
        bounds=(0,),
        tokenizer=head["tokenizer"],
        evaluation=head["evaluation"],
        told=Outline(stages, tuple(head["parts"]), head["is_divided"]),
    )
    return plan, [begin + int(end) for end in head["ends"][:-1]]


def _stage(work: Path, name: str, tasks: int, folder: str) -> Stage:
    """Return a stage that a plan names; its folder must be one of ours. Raises ValueError, TypeError."""
    if not re.fullmatch(rf"[a-z]+-[0-9a-f]{{{NAME_DIGITS}}}", folder) or not folder.startswith(f"{name}-"):
        raise ValueError(f"{folder} is no folder of stage {name}")
    return Stage(name, int(tasks), work / folder)


@lru_cache(maxsize=1)
def _load_tokenizer(path: Path, digest: str, eod: str | None) -> Tokenizer:
    tokenizer = Tokenizer.load(path, eod=eod)
    if tokenizer.digest != digest:
        raise CorruptFileError(f"{path} differs from the plan beside it: build again")
    return tokenizer


def shard_bytes(total: int) -> int:
    """Return the size of a shard for `total` bytes of input: 8 MiB to 1 GiB, about 4,096 shards between.

    It decides how the work is divided and never the output.
    """
    return min(1 << 30, max(1 << 23, total // 4096))
