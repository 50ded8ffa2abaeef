"""Stages `link`, `group` and `gather`: the components of the links of all bands, in bounded memory.

link    task t: the links of all bands whose greater document is in range t, reduced to stars
group   the components of all links: members [k] and bounds [c + 1], as `duplicates.components` returns them
gather  the documents to remove, of all tasks of `verify`, in order

A link is (a, v), a < v. Links of the documents of a range are reduced to stars: (m, v), m the least document
of a component. A link of a star whose v is below the range belongs to a lower range. So `group` sweeps the
ranges twice (time-forward processing, Chiang et al. 1995, "External-memory graph algorithms"). Downwards
every v of a range gets one link (m, v). Upwards it gets its label, the least document of its component: m, or
the label of m, which a lower range has computed. Memory holds a range's documents and as many links; ranges
exchange links through files, 16 bytes each. A component larger than a range is sorted in memory; `verify`
takes a kilobyte for each of its documents.
"""

import secrets
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from mlm.corpus.duplicates import components, star_links, starts_of_runs
from mlm.corpus.stages.clean import save
from mlm.corpus.stages.match import CleanTexts, Ids, load
from mlm.corpus.stages.plan import BuildPlan

BYTES = 256
"""Bytes of memory for a document of a range and a link; less than 200 were measured."""
NO_LINKS = np.empty((0, 2), np.int64)


def at_once(plan: BuildPlan) -> int:
    """Return the documents of a range, which is also the number of links read together."""
    return max(1, int(plan.config.memory_gb * 1e9) // BYTES)


def ranges(begin: int, end: int, most: int) -> Ids:
    """Return bounds of ranges of at most `most` documents in [begin, end): int64 [ranges + 1]."""
    count = max(1, -(-(end - begin) // most))
    return begin + np.arange(count + 1) * (end - begin) // count


def link(plan: BuildPlan, task: int) -> None:
    stage, total = plan.stages["link"], len(CleanTexts(plan))
    begin, end = total * task // stage.tasks, total * (task + 1) // stage.tasks
    band_links, files = [load(path) for path in plan.stages["match"].files()], list[Path]()

    def write(links: Ids) -> None:
        if len(links):
            links = links[np.argsort(links[:, 1], kind="stable")]
            files.append(save(stage.folder / f"{task:05d}-{len(files):05d}.npy", links))

    for low, high in pairwise(ranges(begin, end, at_once(plan)).tolist()):
        stars = NO_LINKS
        for block in blocks((links_between(links, low, high) for links in band_links), at_once(plan)):
            stars, below = reduce(stars, block, low, high)
            write(below)
        write(stars)
    stage.finish(task, {}, files)


def reduce(stars: Ids, links: Ids, low: int, high: int) -> tuple[Ids, Ids]:
    """Return the stars of both links, of documents below `high`: from `low` on, and below `low`."""
    merged = star_links(*components(np.concatenate([stars, links]), high))
    is_in_range = merged[:, 1] >= low
    return merged[is_in_range], merged[~is_in_range]


def links_between(links: Ids, low: int, high: int) -> Ids:
    """Return the links whose greater document is in [low, high), sorted by it: [m, 2]."""
    begin, end = np.searchsorted(links[:, 1], [low, high])
    return links[begin:end]


def blocks(parts: Iterable[Ids], most: int) -> Iterator[Ids]:
    """Yield the rows of arrays in blocks of `most` rows; the last has fewer."""
    pending, size = list[Ids](), 0
    for part in parts:
        while size + len(part) >= most:
            yield np.concatenate([*pending, part[: most - size]])
            pending, size, part = [], 0, part[most - size :]
        if len(part):
            pending.append(np.array(part))
            size += len(part)
    if size:
        yield np.concatenate(pending)


class PairFiles:
    """Pairs of documents on disk, a file for each range; their names begin with `prefix`."""

    def __init__(self, prefix: str, bounds: Ids) -> None:
        self._prefix, self._bounds = prefix, bounds

    def add(self, pairs: Ids, documents: Ids) -> None:
        """Append each pair [m, 2] to the file of the range that its document [m] is in."""
        order = np.argsort(documents, kind="stable")
        ends = np.searchsorted(documents[order], self._bounds)
        for number in np.flatnonzero(np.diff(ends)).tolist():
            with open(self._path(number), "ab") as f:
                pairs[order[ends[number] : ends[number + 1]]].tofile(f)

    def of(self, number: int) -> Ids:
        """Return the pairs of a range, mapped: [m, 2]."""
        path = self._path(number)
        return np.memmap(path, np.int64, "r").reshape(-1, 2) if path.exists() else NO_LINKS

    def _path(self, number: int) -> Path:
        return Path(f"{self._prefix}-{number:05d}.partial")


def group(plan: BuildPlan, _: int) -> None:
    stage, most = plan.stages["group"], at_once(plan)
    token = secrets.token_hex(4)  # a process on a lost node may still run this task
    prefix = f"{stage.folder}/.{token}"
    bounds = ranges(0, len(CleanTexts(plan)), most)
    labelled = label_documents([load(path) for path in plan.stages["link"].files()], bounds, prefix, most)
    members, starts = (Path(f"{prefix}-{name}.partial") for name in ("members", "starts"))
    with open(members, "wb") as members_file, open(starts, "wb") as starts_file:
        for number in range(len(bounds) - 1):
            labels, documents = labelled.of(number).T
            firsts = np.unique(labels)
            keys, documents = np.concatenate([firsts, labels]), np.concatenate([firsts, documents])
            order = np.lexsort((documents, keys))
            num_before = members_file.tell() // 8
            documents[order].tofile(members_file)
            (num_before + starts_of_runs(keys[order])[:-1]).tofile(starts_file)
        np.array([members_file.tell() // 8]).tofile(starts_file)
    files = [
        save(stage.folder / f"{name}.npy", mapped(raw))
        for name, raw in (("members", members), ("bounds", starts))
    ]
    for path in stage.folder.glob(f".{token}-*"):
        path.unlink()
    stage.finish(0, {}, files)


def label_documents(linked: list[Ids], bounds: Ids, prefix: str, most: int) -> PairFiles:
    """Return (label, document) of each document but the first of its component, by range of labels.

    `linked` are links [m, 2] sorted by their greater document, `bounds` the ranges [ranges + 1];
    `prefix` begins the names of files.
    """
    carried, queries, labels, by_label = (
        PairFiles(f"{prefix}-{name}", bounds) for name in ("carried", "asked", "labels", "found")
    )
    numbered = list(enumerate(pairwise(bounds.tolist())))
    for number, (low, high) in reversed(numbered):
        stars = NO_LINKS
        range_links = [links_between(links, low, high) for links in linked]
        for block in blocks([*range_links, carried.of(number)], most):
            stars, below = reduce(stars, block, low, high)
            carried.add(below, below[:, 1])
        is_first = stars[:, 0] >= low
        labels.add(stars[is_first], stars[is_first, 1])
        queries.add(stars[~is_first], stars[~is_first, 0])
    for number, _ in numbered:
        label_pairs = np.array(labels.of(number))
        label_pairs = label_pairs[np.argsort(label_pairs[:, 1])]
        by_label.add(label_pairs, label_pairs[:, 0])
        for block in blocks([queries.of(number)], most):  # (document of this range, of a higher range)
            rows = np.searchsorted(label_pairs[:, 1], block[:, 0])
            is_labelled = np.append(label_pairs[:, 1], -1)[rows] == block[:, 0]
            block[is_labelled, 0] = label_pairs[rows[is_labelled], 0]
            labels.add(block, block[:, 1])
    return by_label


def gather(plan: BuildPlan, _: int) -> None:
    """Write the near-duplicates of all tasks of `verify`, sorted."""
    verified, stage, texts = plan.stages["verify"], plan.stages["gather"], CleanTexts(plan)
    removed = [load(path) for path in verified.files()]
    with open(raw := stage.folder / f".{secrets.token_hex(4)}.partial", "wb") as f:
        for limits in pairwise(ranges(0, len(texts), at_once(plan)).tolist()):
            parts = [part[slice(*np.searchsorted(part, limits))] for part in removed]
            np.sort(np.concatenate([np.empty(0, np.int64), *parts])).tofile(f)
    files = [save(stage.folder / "near.npy", mapped(raw)), save(stage.folder / "firsts.npy", texts.firsts)]
    raw.unlink()
    stage.finish(0, {}, files)


def mapped(path: Path) -> Ids:
    return np.memmap(path, np.int64, "r") if path.stat().st_size else np.empty(0, np.int64)
