"""Stages `match`, `group`, `verify` and `gather`: which documents are near-duplicates of an earlier one.

match   task b: documents that agree on band b, as links [m, 2]
group   documents that links connect, directly or not, a component each
verify  in every component, in corpus order: a document is removed if its exact Jaccard similarity with an
        earlier kept one is above the threshold
gather  the documents to remove, of all tasks, in order: each task of the next stage looks up its own

Documents are numbered over all shards in corpus order. `match` holds AT_ONCE of their keys at a time, so
its memory is bounded; that of `group` grows with the documents that have links, about 40 bytes each.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.corpus.duplicates import components, duplicates_in, links_of_band, star_links
from mlm.corpus.stages.clean import save
from mlm.corpus.stages.plan import BuildPlan, BuildStage
from mlm.data.indexed import IndexedDataset

Ids = NDArray[np.int64]

AT_ONCE = 1 << 22
"""Keys of a band in memory: with what is made of them about 130 MB."""
PASSES = 64
"""Limit on readings of the keys of a band; beyond AT_ONCE * PASSES documents memory grows instead."""


@lru_cache(maxsize=1)
def first_documents(stage: BuildStage) -> Ids:
    """Number of the first document of each task of `clean`, then of all documents: [tasks + 1].

    Kept between the tasks of a process. A stage's folder is named after all that its counts depend on.
    """
    kept = [counts["kept/documents"] for counts in stage.counts()]
    return np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)


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
        """The keys of a shard, mapped: [bands, documents]."""
        return load(self.folder / f"{shard:05d}.keys.npy")

    def text(self, document: int) -> str:
        shard = int(np.searchsorted(self.firsts, document, side="right")) - 1
        return self._open(shard)[0][document - int(self.firsts[shard])].tobytes().decode()

    def keys(self, documents: Ids) -> NDArray[np.uint64]:
        """Band keys of documents in ascending order: [k, bands]."""
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
    stage = plan.stages["match"]
    links = [documents[links_of_band(keys)] for documents, keys in slices(CleanTexts(plan), task)]
    path = stage.folder / f"{task:05d}.npy"
    stage.finish(task, {}, [save(path, np.concatenate([np.empty((0, 2), dtype=np.int64), *links]))])


def slices(texts: CleanTexts, band: int) -> Iterator[tuple[Ids, NDArray[np.uint64]]]:
    """All documents with their keys of a band, in slices of about AT_ONCE.

    Equal keys lie in one slice, in the order of their documents.
    """
    count = np.uint64(min(PASSES, max(1, -(-len(texts) // AT_ONCE))))
    for residue in range(int(count)):
        documents, keys = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.uint64)]
        for shard, first in enumerate(texts.firsts[:-1]):
            of_shard = texts.keys_of(shard)[band]
            in_slice = np.flatnonzero(of_shard % count == residue)
            documents.append(in_slice + first)
            keys.append(of_shard[in_slice])
        yield np.concatenate(documents), np.concatenate(keys)


def group(plan: BuildPlan, _: int) -> None:
    """Components of all links. One band after another is folded in, so that few links are held at a time."""
    before, stage = plan.stages["match"], plan.stages["group"]
    total = len(CleanTexts(plan))
    links = np.empty((0, 2), dtype=np.int64)
    for band in range(before.tasks):
        links = np.concatenate([links, load(before.folder / f"{band:05d}.npy")])
        links = star_links(*components(links, total))
    members, bounds = components(links, total)
    files = [("members", members), ("bounds", bounds)]
    stage.finish(0, {}, [save(stage.folder / f"{name}.npy", values) for name, values in files])


def verify(plan: BuildPlan, task: int) -> None:
    stage, grouped = plan.stages["verify"], plan.stages["group"].folder
    members, bounds = load(grouped / "members.npy"), load(grouped / "bounds.npy")
    texts, duplicates = CleanTexts(plan), []
    # about as many documents as of every other task
    limits = np.array([task, task + 1]) * int(bounds[-1]) // stage.tasks
    begin, end = np.searchsorted(bounds, limits, side="left").tolist()
    for i in range(begin, min(end, len(bounds) - 1)):
        component = members[bounds[i] : bounds[i + 1]]
        if len(component) > 1:
            duplicates += duplicates_in(component, texts.keys, texts.text, plan.config.dedup)
    removed = np.array([duplicate.document for duplicate in duplicates], dtype=np.int64)
    stage.finish(task, {}, [save(stage.folder / f"{task:05d}.npy", removed)])


def gather(plan: BuildPlan, _: int) -> None:
    """The near-duplicates that all tasks of `verify` found, sorted."""
    verified, stage = plan.stages["verify"], plan.stages["gather"]
    removed = [load(verified.folder / f"{task:05d}.npy") for task in range(verified.tasks)]
    near = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *removed]))
    files = [("near", near), ("firsts", CleanTexts(plan).firsts)]
    stage.finish(0, {}, [save(stage.folder / f"{name}.npy", values) for name, values in files])


def removal_mask(plan: BuildPlan, task: int) -> NDArray[np.bool_]:
    """Mask of a task's documents to remove: bool [documents]."""
    folder = plan.stages["gather"].folder
    begin, end = load(folder / "firsts.npy")[task : task + 2].tolist()
    near = load(folder / "near.npy")
    first, last = np.searchsorted(near, [begin, end])
    mask = np.zeros(end - begin, dtype=bool)
    mask[near[first:last] - begin] = True
    return mask


def load(path: Path) -> NDArray[Any]:
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
