"""Stages `match`, `group`, `verify` and `gather`: which documents are near-duplicates of an earlier one.

match   task b < bands: documents that agree on band b, as links [m, 2]; the last task: documents with the
        id of an earlier one
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
        """Number of each shard's first document, then of all documents: [shards + 1]."""
        self._shards: dict[int, tuple[IndexedDataset, NDArray[np.uint64]]] = {}

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def array(self, shard: int, name: str) -> NDArray[np.uint64]:
        """An array of a shard, mapped: `keys` [bands, documents] or `ids` [documents]."""
        path = self.folder / f"{shard:05d}.{name}.npy"
        return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)

    def text(self, document: int) -> str:
        """One text."""
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
            self._shards[shard] = texts, self.array(shard, "keys")
        return self._shards[shard]


def match(plan: BuildPlan, task: int) -> None:
    """Links of one band; of the last task, the documents whose id was seen before."""
    texts, stage = CleanTexts(plan), plan.stages["match"]
    path = stage.folder / f"{task:05d}.npy"
    if task < stage.tasks - 1:
        links = [documents[links_of_band(keys)] for documents, keys in slices(texts, task)]
        stage.finish(task, {}, [save(path, np.concatenate([np.empty((0, 2), dtype=np.int64), *links]))])
        return
    seen_before = [np.empty(0, dtype=np.int64)]
    if plan.config.id_key is not None:
        seen_before += [documents[repeated(ids)] for documents, ids in slices(texts, None)]
    stage.finish(task, {}, [save(path, np.sort(np.concatenate(seen_before)))])


def slices(texts: CleanTexts, band: int | None) -> Iterator[tuple[Ids, NDArray[np.uint64]]]:
    """All documents with their keys of a band, or with their ids, in slices of about AT_ONCE.

    Equal keys lie in one slice, in the order of their documents.
    """
    count = np.uint64(min(PASSES, max(1, -(-len(texts) // AT_ONCE))))
    for residue in range(int(count)):
        documents, keys = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.uint64)]
        for shard, first in enumerate(texts.firsts[:-1]):
            of_shard = texts.array(shard, "ids") if band is None else texts.array(shard, "keys")[band]
            mine = np.flatnonzero(of_shard % count == residue)
            documents.append(mine + first)
            keys.append(of_shard[mine])
        yield np.concatenate(documents), np.concatenate(keys)


def repeated(ids: NDArray[np.uint64]) -> Ids:
    """Positions of ids that occurred before: int64 [k]."""
    order = np.argsort(ids, kind="stable")
    return order[np.flatnonzero(ids[order][1:] == ids[order][:-1]) + 1]


def group(plan: BuildPlan, _: int) -> None:
    """Components of all links. One band after another is folded in, so that few links are held at a time."""
    before, stage = plan.stages["match"], plan.stages["group"]
    total, bands = len(CleanTexts(plan)), before.tasks - 1
    links = np.empty((0, 2), dtype=np.int64)
    for band in range(bands):
        links = np.concatenate([links, load(before.folder / f"{band:05d}.npy")])
        links = star_links(*components(links, total))
    members, bounds = components(links, total)
    # A document that is removed for its id proposes nothing, but may connect others.
    stays = ~np.isin(members, load(before.folder / f"{bands:05d}.npy"))
    bounds = np.append(0, np.cumsum(stays))[bounds]
    files = [("members", members[stays]), ("bounds", bounds)]
    stage.finish(0, {}, [save(stage.folder / f"{name}.npy", values) for name, values in files])


def verify(plan: BuildPlan, task: int) -> None:
    """Duplicates among this task's share of the components."""
    stage, grouped = plan.stages["verify"], plan.stages["group"].folder
    members, bounds = load(grouped / "members.npy"), load(grouped / "bounds.npy")
    texts, duplicates = CleanTexts(plan), []
    begin, end = component_range(bounds, task, stage.tasks)
    for i in range(begin, end):
        component = members[bounds[i] : bounds[i + 1]]
        if len(component) > 1:
            duplicates += duplicates_in(component, texts.keys, texts.text, plan.config.dedup)
    removed = np.array([duplicate.document for duplicate in duplicates], dtype=np.int64)
    stage.finish(task, {}, [save(stage.folder / f"{task:05d}.npy", removed)])


def component_range(bounds: Ids, task: int, tasks: int) -> tuple[int, int]:
    """Return the range of components of a task: about as many documents as every other."""
    limits = np.array([task, task + 1]) * int(bounds[-1]) // tasks
    begin, end = np.searchsorted(bounds, limits, side="left").tolist()
    return begin, min(end, len(bounds) - 1)


def gather(plan: BuildPlan, _: int) -> None:
    """The near-duplicates that all tasks of `verify` found, and those of ids, sorted."""
    verified, matched, stage = (plan.stages[name] for name in ("verify", "match", "gather"))
    removed = [load(verified.folder / f"{task:05d}.npy") for task in range(verified.tasks)]
    near = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *removed]))
    again = load(matched.folder / f"{matched.tasks - 1:05d}.npy")
    files = [
        save(stage.folder / "near.npy", near),
        save(stage.folder / "again.npy", again),
        save(stage.folder / "firsts.npy", CleanTexts(plan).firsts),
    ]
    stage.finish(0, {}, files)


def removal_masks(plan: BuildPlan, task: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks of a task's documents to remove: near-duplicates, and ids seen before. Both [documents]."""
    folder = plan.stages["gather"].folder
    begin, end = load(folder / "firsts.npy")[task : task + 2].tolist()
    near, again = (mask_of(load(folder / f"{name}.npy"), begin, end) for name in ("near", "again"))
    return near, again


def mask_of(documents: Ids, begin: int, end: int) -> NDArray[np.bool_]:
    """Mask of the documents begin … end - 1 that are among others, which are sorted: bool [end - begin]."""
    mask = np.zeros(end - begin, dtype=bool)
    first, last = np.searchsorted(documents, [begin, end])
    mask[documents[first:last] - begin] = True
    return mask


def load(path: Path) -> Ids:
    """A mapped array that `save` wrote."""
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
