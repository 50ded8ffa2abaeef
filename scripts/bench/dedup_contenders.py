"""Who removes near-duplicates: mlm through the functions of `mlm data build`, and libraries as they come.

A contender takes texts in corpus order and returns the positions of those that go.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise

import numpy as np

from bench.dedup_corpus import NGRAM, grams
from mlm.corpus.config import DedupConfig
from mlm.corpus.duplicates import components, duplicates_in, links_of_band, star_links
from mlm.corpus.minhash import MinHasher

SLOTS = 128  # of the libraries that decide by a signature's estimate: the default of both


@dataclass(frozen=True)
class Contender:
    """A method, what it needs, and the kinds of shingles it can be given."""

    run: Callable[[Sequence[str]], set[int]]
    packages: tuple[str, ...]
    units: tuple[str, ...] = ("word", "character")

    def missing(self, unit: str) -> str:
        """Why it is left out; empty if it is not."""
        absent = [name for name in self.packages if find_spec(name) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if unit not in self.units:
            return f"knows no shingles of unit {unit}"
        try:
            self.run(["some words in a row", "and some others after them"])  # and what it imports is loaded
        except Exception as error:  # whatever keeps a library from running here is no problem of the others
            return f"fails with the packages installed: {type(error).__name__}: {error}"
        return ""


def contenders(config: DedupConfig) -> dict[str, Contender]:
    spacy = ("datatrove", "spacy")
    return {
        "mlm": Contender(partial(run_mlm, config=config), ("rensa",)),
        "datatrove 14x8": Contender(partial(run_datatrove, bands=14, rows=8), spacy, ("word",)),
        f"datatrove {config.bands}x{config.rows}": Contender(
            partial(run_datatrove, bands=config.bands, rows=config.rows), spacy, ("word",)
        ),
        "datasketch": Contender(partial(run_datasketch, config=config), ("datasketch",)),
        "rensa": Contender(partial(run_rensa, config=config), ("rensa",)),
    }


def run_mlm(texts: Sequence[str], config: DedupConfig) -> set[int]:
    keys = MinHasher(config).keys(texts)
    links = np.empty((0, 2), np.int64)
    for band in np.ascontiguousarray(keys.T):
        links = star_links(*components(np.concatenate((links, links_of_band(band))), len(texts)))
    documents, bounds = components(links, len(texts))
    removed = set[int]()
    for first, last in pairwise(bounds):
        found = duplicates_in(documents[first:last], keys.__getitem__, texts.__getitem__, config)
        removed.update(duplicate.document for duplicate in found)
    return removed


def run_datatrove(texts: Sequence[str], bands: int, rows: int) -> set[int]:
    """The four steps of datatrove's MinHash, in one process and on one rank."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from loguru import logger

    logger.disable("datatrove")
    config = MinhashConfig(n_grams=NGRAM, num_buckets=bands, hashes_per_bucket=rows)
    documents = [Document(text=text, id=str(i)) for i, text in enumerate(texts)]
    with tempfile.TemporaryDirectory(prefix="bench-dedup-") as folder:
        signatures, buckets, clusters = (f"{folder}/{name}" for name in ("signatures", "buckets", "clusters"))
        MinhashDedupSignature(signatures, config=config).run(iter(documents), 0, 1)
        for band in range(bands):
            MinhashDedupBuckets(signatures, buckets, config=config).run(None, band, bands)
        with redirect_stderr(StringIO()):  # its progress bar
            MinhashDedupCluster(buckets, clusters, config=config).run(None, 0, 1)
        stays = {int(document.id) for document in MinhashDedupFilter(clusters).run(iter(documents), 0, 1)}
    return set(range(len(texts))) - stays


def run_datasketch(texts: Sequence[str], config: DedupConfig) -> set[int]:
    """A document goes when the index of those that stay has a match."""
    from datasketch import MinHash, MinHashLSH

    index, removed = MinHashLSH(threshold=config.threshold, num_perm=SLOTS), set[int]()
    for i, text in enumerate(texts):
        signature = MinHash(num_perm=SLOTS)
        signature.update_batch([gram.encode() for gram in grams(text, config.unit)])
        if index.query(signature):
            removed.add(i)
        else:
            index.insert(i, signature)
    return removed


def run_rensa(texts: Sequence[str], config: DedupConfig) -> set[int]:
    """rensa's own deduplicator: candidates by LSH, decided by the signatures' estimate."""
    from rensa import RMinHashDeduplicator

    index = RMinHashDeduplicator(threshold=config.threshold, num_perm=SLOTS, use_lsh=True)
    stays = index.add_pairs((str(i), list(grams(text, config.unit))) for i, text in enumerate(texts))
    return {i for i, kept in enumerate(stays) if not kept}
