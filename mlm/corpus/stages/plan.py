"""The plan of a build: its inputs, its stages, and the folder of each.

The plan is a JSON file in the work folder, so that a task on another machine can read it. A stage's folder is
named after the digest of all that its output is a function of: its contents were made by equal stages from
equal inputs, whichever build made them, and can be reused.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from mlm.config.build import from_dict, to_dict
from mlm.corpus.config import DataBuildConfig
from mlm.corpus.read.records import Input, Shard
from mlm.data.corpus_files import SPLITS, parse_split
from mlm.data.tokenizer import Tokenizer
from mlm.errors import CorruptFileError
from mlm.files.atomic import digest_bytes, write_atomic

VERSION = 2  # of what the stages write; part of every stage's digest
PLAN = "plan.json"
TOKENIZER = "tokenizer.json"
EVALUATION = "evaluation.jsonl"
MAX_PLAN_BYTES = 1 << 30
NAME_DIGITS = 16  # hexadecimal digits of a digest in a folder's name


@dataclass(frozen=True)
class Stage:
    """One step of a build: independent tasks that read the stages before it."""

    name: str
    tasks: int
    folder: Path
    """Folder of its tasks' files."""


@dataclass(frozen=True)
class Plan:
    """A build, as its tasks see it. All of it is a function of configuration and inputs."""

    config: DataBuildConfig
    work: Path
    inputs: tuple[Input, ...]
    shards: tuple[Shard, ...]
    bounds: tuple[int, ...]
    """First shard of each task of the stages that read them, then the number of shards."""
    tokenizer: str
    """Digest of tokenizer.json."""
    evaluation: str | None
    """Digest of the evaluation texts to keep out, None where there are none."""

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

    @cached_property
    def is_divided(self) -> bool:
        """True if documents are assigned to parts; False if the input folder has parts."""
        return not any(item.split for item in self.inputs)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The parts of the corpus: those of the input folder, or those with a share."""
        given = {shard.split for shard in self.shards if shard.split}
        shares = dict(zip(SPLITS, parse_split(self.config.split), strict=True))
        return tuple(part for part in SPLITS if (part in given if given else shares[part] > 0))

    @cached_property
    def stages(self) -> dict[str, Stage]:
        """The stages by name, in their order."""
        many = len(self.bounds) - 1
        tasks = {"clean": many}
        if self.removes:
            bands = self.config.dedup.bands if self.config.dedup.enabled else 0
            tasks |= {"match": bands + 1, "group": 1, "verify": many, "gather": 1}
        tasks |= {"tokenise": many, "merge": len(self.parts)}
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
        content = {
            "config": to_dict(self.config),
            "inputs": [asdict(item) for item in self.inputs],
            "shards": [asdict(shard) for shard in self.shards],
            "bounds": self.bounds,
            "tokenizer": self.tokenizer,
            "evaluation": self.evaluation,
        }
        path = self.work / PLAN
        write_atomic(path, json.dumps(content).encode())
        return path

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """The plan in a work folder, read once for all tasks of a process. Raises CorruptFileError."""
        try:
            state = path.stat()
        except FileNotFoundError as error:
            raise CorruptFileError(f"{path} is missing: build again") from error
        return _load_plan(path, state.st_ino, state.st_size, state.st_mtime_ns)

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """The plan in a work folder. Raises CorruptFileError."""
        remedy = "delete the work folder and build again"
        try:
            if path.stat().st_size > MAX_PLAN_BYTES:
                raise CorruptFileError(f"{path}: larger than {MAX_PLAN_BYTES} bytes: {remedy}")
            content = json.loads(path.read_bytes())
            return cls(
                config=from_dict(DataBuildConfig, content["config"]),
                work=path.parent,
                inputs=tuple(Input(**item | {"state": tuple(item["state"])}) for item in content["inputs"]),
                shards=tuple(Shard(**shard) for shard in content["shards"]),
                bounds=tuple(content["bounds"]),
                tokenizer=content["tokenizer"],
                evaluation=content["evaluation"],
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptFileError(f"{path} is not the plan of a build: {remedy}") from error


@lru_cache(maxsize=1)
def _load_plan(path: Path, *_: int) -> Plan:
    return Plan.read(path)


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
