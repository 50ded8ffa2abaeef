"""Stages `match` and `verify`: which documents are near-duplicates of an earlier one.

match   task b * parts + p: links [m, 2] of documents that agree on band b, for part p of the keys
link, group
        the connected components of the links (group.py)
verify  in every component, in corpus order: a document is removed if its exact Jaccard similarity with an
        earlier kept one is above the threshold
gather  the documents to remove, of all tasks, in order (group.py)

Documents are numbered over all shards in corpus order. A task of `match` reads the keys of its band once for
every `memory_gb` / KEY_BYTES keys of its part.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.corpus.duplicates import duplicates_in, links_of_band
from mlm.corpus.stages.clean import save
from mlm.corpus.stages.plan import BuildPlan, BuildStage
from mlm.data.indexed import IndexedDataset

Ids = NDArray[np.int64]

KEY_BYTES = 64
"""Bytes of memory for a key and the arrays computed from it."""


@lru_cache(maxsize=1)
def first_documents(stage: BuildStage) -> Ids:
    """Return the number of the first document of each task of `clean`, then of all documents: [tasks + 1].

    Cached between the tasks of a process: the name of a stage's folder depends on all inputs of its counts.
    """
    sizes = [counts["kept/documents"] for counts in stage.counts()]
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


class CleanTexts:
    """The documents that stage `clean` kept, by their number in the corpus."""

    def __init__(self, plan: BuildPlan) -> None:
        stage = plan.stages["clean"]
        self.folder = stage.folder
        self.firsts = first_documents(stage)
        self._shards: dict[int, tuple[IndexedDataset, NDArray[np.uint64]]] = {}

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def keys_of(self, shard: int) -> NDArray[np.uint64]:
        """Return the keys of a shard, mapped: [bands, documents]."""
        return load(self.folder / f"{shard:05d}.keys.npy")

    def text(self, document: int) -> str:
        shard = int(np.searchsorted(self.firsts, document, side="right")) - 1
        return self._open(shard)[0][document - int(self.firsts[shard])].tobytes().decode()

    def keys(self, documents: Ids) -> NDArray[np.uint64]:
        """Return the band keys of documents, which ascend: [k, bands]."""
        shards = np.searchsorted(self.firsts, documents, side="right") - 1
        begins = np.flatnonzero(np.diff(shards, prepend=-1))
        ends = [*begins[1:].tolist(), len(documents)]
        keys = [
            self._open(int(shards[a]))[1][:, documents[a:b] - self.firsts[shards[a]]].T
            for a, b in zip(begins.tolist(), ends, strict=True)
        ]
        return np.concatenate(keys)

    def _open(self, shard: int) -> tuple[IndexedDataset, NDArray[np.uint64]]:
        if shard not in self._shards:
            texts = IndexedDataset(self.folder / f"{shard:05d}", allow_empty=True)
            self._shards[shard] = texts, self.keys_of(shard)
        return self._shards[shard]


def match(plan: BuildPlan, task: int) -> None:
    stage, texts = plan.stages["match"], CleanTexts(plan)
    parts = stage.tasks // plan.config.dedup.bands
    band, part = divmod(task, parts)
    most = max(1, int(plan.config.memory_gb * 1e9) // KEY_BYTES)
    passes = max(1, -(-len(texts) // (parts * most)))
    files = []
    for residue in range(part, parts * passes, parts):
        # Equal keys have equal residues, so a pass over one residue finds all its links.
        documents, keys = keys_with(texts, band, residue, parts * passes)
        links = documents[links_of_band(keys)]
        links = links[np.argsort(links[:, 1], kind="stable")]
        files.append(save(stage.folder / f"{task:05d}-{residue:05d}.npy", links))
    stage.finish(task, {}, files)


def keys_with(texts: CleanTexts, band: int, residue: int, modulus: int) -> tuple[Ids, NDArray[np.uint64]]:
    """Return the documents, in order, whose keys of a band have a residue, and these keys: [k] each.

    The arrays of single shards are freed on return, before links are computed.
    """
    documents, keys = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.uint64)]
    for shard, first in enumerate(texts.firsts[:-1]):
        shard_keys = texts.keys_of(shard)[band]
        rows = np.flatnonzero(shard_keys % np.uint64(modulus) == residue)
        documents.append(rows + first)
        keys.append(shard_keys[rows])
    return np.concatenate(documents), np.concatenate(keys)


def verify(plan: BuildPlan, task: int) -> None:
    stage, grouped = plan.stages["verify"], plan.stages["group"].folder
    members, bounds = load(grouped / "members.npy"), load(grouped / "bounds.npy")
    texts, duplicates = CleanTexts(plan), []
    # Tasks get about equally many documents.
    limits = np.array([task, task + 1]) * int(bounds[-1]) // stage.tasks
    begin, end = np.searchsorted(bounds, limits, side="left").tolist()
    for i in range(begin, min(end, len(bounds) - 1)):
        component = members[bounds[i] : bounds[i + 1]]
        if len(component) > 1:
            duplicates += duplicates_in(component, texts.keys, texts.text, plan.config.dedup)
    removed = np.array([duplicate.document for duplicate in duplicates], dtype=np.int64)
    stage.finish(task, {}, [save(stage.folder / f"{task:05d}.npy", np.sort(removed))])


def load(path: Path) -> NDArray[Any]:
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
