"""Entries of data.blend, and their problems that need no corpus to be read."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlm.data.config import DataConfig
from mlm.data.files_present import WRITE_ONE, cache_problem, missing_pair
from mlm.util.errors import Absent, Problem
from mlm.util.object_store import is_stored

MAX_SOURCES = 1000
BLEND = ("data.blend",)
HOW = "write data.blend=[0.3 corpora/wiki,0.7 corpora/web]"


@dataclass(frozen=True)
class WeightedCorpus:
    """An entry of data.blend."""

    text: str
    weight: float | None
    """None if left out: the corpus counts by its tokens."""
    path: str
    """Folder written by `mlm data build`, or prefix of a .bin/.idx pair."""

    @property
    def prefix(self) -> Path:
        return Path(self.path, "train") if Path(self.path).is_dir() else Path(self.path)


def parse_entry(text: str) -> WeightedCorpus:
    """Parse `0.3 corpora/wiki` or `corpora/wiki`. A first word that is not a number belongs to the path."""
    first, _, path = text.strip().partition(" ")
    try:
        weight = float(first)
    except ValueError:
        return WeightedCorpus(text, None, text.strip())
    return WeightedCorpus(text, weight, path.strip())


def normalize_weights(weights: Sequence[float]) -> list[float]:
    """Scale positive, finite weights to sum to 1."""
    exponent = math.frexp(max(weights))[1]  # scaled by a power of two first: the sum could overflow
    scaled = [math.ldexp(weight, -exponent) for weight in weights]
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def blend_problems(data: DataConfig) -> list[Problem]:
    """Return the problems of data.blend. Only names of files are read."""
    if data.kind != "indexed" or not data.blend:
        return []
    entries = [parse_entry(text) for text in data.blend]
    problems = list[Problem]()
    for key, value in (("data.path", data.path), ("data.train", data.train)):
        if value is not None:
            problem = f"data.blend and {key}={value} both name what to train on"
            problems.append(Problem(("data.blend", key), problem, f"leave one of them out ({key}=null)"))
    if len(entries) > MAX_SOURCES:
        problem = f"data.blend names {len(entries)} corpora, {MAX_SOURCES} is the limit"
        problems.append(Problem(BLEND, problem, "join some"))
    for e in entries:
        if e.weight is not None and not (math.isfinite(e.weight) and e.weight > 0):
            problem = f"data.blend: '{e.text}' has the weight {e.weight:g}, which must be above 0 and finite"
            problems.append(Problem(BLEND, problem, "leave the entry out" if e.weight == 0 else HOW))
        elif (missing := problem_of_path(e)) is not None:
            problems.append(missing)
    by_prefix: dict[Path, WeightedCorpus] = {}
    for e in entries:
        if (first := by_prefix.setdefault(e.prefix.resolve(), e)) is not e:
            problem = f"data.blend: '{first.text}' and '{e.text}' are the same corpus"
            problems.append(Problem(BLEND, problem, "name it once, with the sum of the weights"))
    if any(is_stored(e.path) for e in entries):
        problems += filter(None, [cache_problem(data, "data.blend")])
    unweighted = [e for e in entries if e.weight is None]
    if 0 < len(unweighted) < len(entries):
        problem = f"data.blend: '{unweighted[0].text}' has no weight and others have one"
        fix = "give it one, or leave all out: then each corpus counts by its tokens"
        problems.append(Problem(BLEND, problem, fix))
    return problems


def problem_of_path(e: WeightedCorpus) -> Problem | None:
    """Return the problem of a path other than a folder with train.bin/.idx or the prefix of a pair."""
    if not e.path:
        return Problem(BLEND, f"data.blend: '{e.text}' names no corpus", HOW)
    if is_stored(e.path):
        return None  # its local copy is made later
    stem, _, suffix = e.path.rpartition(".")
    if suffix in ("bin", "idx") and not missing_pair(stem):
        return Absent(BLEND, f"data.blend: '{e.text}': give the prefix of .bin and .idx, which is {stem}")
    missing = missing_pair(str(e.prefix))
    if len(missing) == 2 and not Path(e.path).is_dir():
        problem = f"data.blend: '{e.text}': no folder {e.path}, no pair {e.path}.bin/.idx"
        return Absent(BLEND, problem, WRITE_ONE)
    if not missing:
        return None
    return Absent(BLEND, f"data.blend: '{e.text}': {' and '.join(missing)}: not there", WRITE_ONE)


def corpus_names(prefixes: Sequence[Path]) -> list[str]:
    """Return a name of each corpus for logs: its folder's, with parent folders until they are distinct."""

    def plain(word: str) -> str:
        return "".join(c if c.isalnum() or c in "._" else "_" for c in word)[:100]

    # The pair train.bin/.idx is named after its folder.
    paths = [Path(os.path.abspath(p.parent if p.name == "train" else p)) for p in prefixes]
    parts = [[plain(word) for word in path.parts] for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["-".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names) and not {"loss", "perplexity"} & set(names):
            return names
    return [f"{part[-1]}-{number}" for number, part in enumerate(parts)]
