"""Deduplication, from equal band keys to the documents to remove: links, components, exact similarities.

Documents are processed in corpus order. A document is removed if its Jaccard similarity with an earlier kept
one that shares a band key is above the threshold. So each removed document is similar to a kept one, the
first of equal documents is kept, and the result is a function of the corpus and the configuration.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from mlm.corpus.config import DedupConfig
from mlm.corpus.minhash import NO_KEY, Hashes, MinHasher, Numbers, shingles

# Bounds on the work for a component of thousands of documents with common boilerplate. They count documents,
# so the result does not depend on time, machine or number of workers.
SMALL = 64  # components up to this size: every candidate is compared exactly
PROPOSED = 1000  # kept documents that a band key proposes; more common keys are boilerplate
COMPARED = 256  # candidates compared exactly: those with the most similar signatures
SLACK = 4  # standard deviations below the threshold from which the estimate of a signature rules out a pair
CACHED_BYTES = 1 << 26  # shingles kept in memory; others are recomputed from the text


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A document to remove, the earliest kept similar one, and their exact Jaccard similarity."""

    document: int
    original: int
    jaccard: float


def links_of_band(keys: Hashes) -> Numbers:
    """Return links of documents that agree on a band: int64 [m, 2], (first of the group, other document).

    Documents are positions in `keys` [n]. Memory: three arrays of the size of `keys`, and the result.
    """
    members = np.flatnonzero(find_repeated(keys) & (keys != NO_KEY))
    shared = keys[members]
    order = np.argsort(shared, kind="stable")  # in each group the documents keep their order
    return star_links(members[order], starts_of_runs(shared[order]))


def star_links(documents: Numbers, boundaries: Numbers) -> Numbers:
    """Return links from the first document of each group to the others: int64 [m, 2].

    Group g is documents[boundaries[g]:boundaries[g + 1]]. star_links(*components(links, n)) reduces links of
    several bands to at most one per document.
    """
    begins = boundaries[:-1]
    firsts = np.repeat(documents[begins], np.diff(boundaries))
    is_other = np.ones(len(documents), np.bool_)
    is_other[begins] = False
    return np.stack((firsts[is_other], documents[is_other]), axis=1)


def components(links: Numbers, num_documents: int) -> tuple[Numbers, Numbers]:
    """Return the connected components of at least two documents.

    Returns documents [k], sorted by component and within it by number, and boundaries [c + 1]: component i is
    documents[boundaries[i]:boundaries[i + 1]]. Components are ordered by their first documents.

    Each round attaches every root to its smallest neighbour and then flattens the trees (Shiloach and Vishkin
    1982). Two rounds at least halve the roots: O(log k) rounds, and memory in proportion to the links alone.
    """
    documents = np.unique(links)
    assert not len(documents) or (documents[0] >= 0 and documents[-1] < num_documents)
    roots = np.arange(len(documents))
    a, b = np.searchsorted(documents, links[:, 0]), np.searchsorted(documents, links[:, 1])
    while len(a):
        np.minimum.at(roots, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(above := roots[roots], roots):
            roots = above
        a, b = roots[a], roots[b]
        is_cut = a != b
        a, b = a[is_cut], b[is_cut]
    order = np.argsort(roots, kind="stable")
    return documents[order], starts_of_runs(roots[order])


def duplicates_in(
    component: Numbers,
    keys_of: Callable[[Numbers], Hashes],
    text_of: Callable[[int], str],
    config: DedupConfig,
) -> list[Duplicate]:
    """Return the documents of one component to remove, in corpus order.

    `component` [k] holds document numbers, ascending; keys_of(documents [k]) returns band keys [k, bands],
    text_of(document) the text. Memory: about 3 * bands * 8 bytes per document of the component, shingles up
    to CACHED_BYTES, and a sketch of bands * rows bytes per kept document.
    """
    keys = keys_of(component)
    # A key of only one document of the component proposes no candidates.
    shared = find_repeated(keys.reshape(-1)).reshape(keys.shape) & (keys != NO_KEY)
    kept_documents = KeptDocuments(config, text_of, estimates=len(component) > SMALL)
    # Digest of a removed or kept text -> the kept document and the similarity.
    decisions: dict[bytes, tuple[int, float]] = {}
    duplicates = []
    for document, document_keys, is_shared in zip(component.tolist(), keys, shared, strict=True):
        proposing = document_keys[is_shared].tolist()
        if not proposing:
            continue
        text = text_of(document)
        digest = xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))
        if digest not in decisions:
            hashes = shingles(text, ngram=config.ngram, unit=config.unit)
            similar = kept_documents.first_similar(hashes, proposing)
            if similar is None:
                kept_documents.add(document, hashes, proposing)
                if config.threshold < 1:
                    decisions[digest] = document, 1.0
                continue
            decisions[digest] = similar
        duplicates.append(Duplicate(document, *decisions[digest]))
    return duplicates


@dataclass(slots=True)
class KeptDocuments:
    """The documents of a component that are kept so far, numbered by position."""

    config: DedupConfig
    text_of: Callable[[int], str]
    estimates: bool
    """True if signatures choose among candidates."""
    documents: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Shingles of each."""
    by_key: dict[int, list[int]] = field(default_factory=dict)
    """Positions that each band key proposes."""
    sketches: NDArray[np.uint8] = field(init=False)
    """Low byte of each slot of each signature (b-bit minwise hashing, Li and König 2010): [>= n, slots]."""
    sketch: NDArray[np.uint8] = field(init=False)
    """Sketch of the latest document."""
    cache: OrderedDict[int, Hashes] = field(default_factory=OrderedDict)
    """Shingles by position, the least recently used first."""
    cached_bytes: int = 0

    def __post_init__(self) -> None:
        self.sketches = np.empty((0, self.config.bands * self.config.rows), np.uint8)
        self.sketch = np.empty(0, np.uint8)

    def first_similar(self, hashes: Hashes, keys: list[int]) -> tuple[int, float] | None:
        """Return the earliest candidate above the threshold and its similarity with a document's `hashes`."""
        threshold = self.config.threshold
        lists = [self.by_key[key] for key in keys if key in self.by_key]
        candidates = np.array(sorted(set().union(*lists)), np.int64)
        # |A and B| <= min, |A or B| >= max
        sizes = np.array([self.sizes[i] for i in candidates.tolist()], np.int64)
        least, greatest = np.minimum(sizes, len(hashes)), np.maximum(sizes, len(hashes))
        candidates = candidates[least > threshold * greatest]
        if self.estimates:
            # the low bytes of a signature [slots]
            slots = MinHasher(self.config).slots(hashes, np.array([0, len(hashes)]))[0]
            self.sketch = (slots & 0xFF).astype(np.uint8)
            estimate = (self.sketches[candidates] == self.sketch).mean(axis=1)
            deviation = (threshold * (1 - threshold) / len(self.sketch)) ** 0.5
            above = estimate > threshold - SLACK * deviation
            candidates, estimate = candidates[above], estimate[above]
            best = np.argsort(-estimate, kind="stable")[:COMPARED]
            candidates = np.sort(candidates[best])
        for position in candidates.tolist():
            if position in self.cache:
                self.cache.move_to_end(position)
                candidate = self.cache[position]
            else:
                text = self.text_of(self.documents[position])
                candidate = shingles(text, ngram=self.config.ngram, unit=self.config.unit)
                self._remember(position, candidate)
            similarity = jaccard(hashes, candidate)
            if similarity > threshold:
                return self.documents[position], similarity
        return None

    def add(self, document: int, hashes: Hashes, keys: list[int]) -> None:
        """Keep the document of the preceding call of `first_similar`."""
        position = len(self.documents)
        self.documents.append(document)
        self.sizes.append(len(hashes))
        for key in keys:
            positions = self.by_key.setdefault(key, [])
            if len(positions) < PROPOSED:
                positions.append(position)
        if self.estimates:
            if position == len(self.sketches):
                self.sketches = np.resize(self.sketches, (max(2 * position, SMALL), self.sketches.shape[1]))
            self.sketches[position] = self.sketch
        self._remember(position, hashes)

    def _remember(self, position: int, hashes: Hashes) -> None:
        self.cache[position] = hashes
        self.cached_bytes += hashes.nbytes
        while self.cached_bytes > CACHED_BYTES and len(self.cache) > 1:
            _, oldest = self.cache.popitem(last=False)
            self.cached_bytes -= oldest.nbytes


def jaccard(a: Hashes, b: Hashes) -> float:
    joined = np.concatenate((a, b))
    joined.sort(kind="stable")  # two runs: merged in linear time
    common = int(np.count_nonzero(joined[1:] == joined[:-1]))
    return common / (len(joined) - common)


def find_repeated(values: NDArray) -> NDArray[np.bool_]:
    order = np.argsort(values)
    in_order = values[order]
    same = in_order[1:] == in_order[:-1]
    del in_order  # the array is as large as all keys of a band
    repeated = np.zeros(len(values), np.bool_)
    repeated[order[1:]] = same
    repeated[order[:-1]] |= same
    return repeated


def starts_of_runs(values: NDArray) -> Numbers:
    """Return the starts of runs of equal values, then the length of `values`: [runs + 1]."""
    if not len(values):
        return np.zeros(1, np.int64)
    return np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1, [len(values)]))
