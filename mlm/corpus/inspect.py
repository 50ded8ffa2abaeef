"""Facts of a corpus: counts, lengths, beginnings of documents."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.data.indexed import VERSION, IndexedDataset
from mlm.data.tokenizer import Tokenizer

Facts = dict[str, Any]
"""Counts, as the result file holds them."""


def facts_of(prefix: Path, tokenizer: Tokenizer | None, eod_id: int | None, samples: int) -> Facts:
    """Return counts of a corpus, and the beginnings of `samples` documents: 64 ids, and 200 letters of text.

    The text is None without a tokenizer for the ids.
    """
    corpus = IndexedDataset(prefix, allow_empty=True)
    share, num_checked = None, 0
    if eod_id is not None and corpus.num_documents:
        numbers = np.array(spaced(corpus.num_documents, 10_000))  # each costs a page
        starts, ends = corpus.document_starts[numbers], corpus.document_starts[numbers + 1]
        count = int((corpus.tokens[ends[ends > starts] - 1] == eod_id).sum())
        share, num_checked = count / len(numbers), len(numbers)
    samples_shown = list[Facts]()
    for number in spaced(corpus.num_documents, samples):
        document, text = corpus.document(number), None
        ids = [int(token) for token in document[:64]]
        if tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in ids):
            text = tokenizer.decode(ids)[:200]
        samples_shown.append({"document": number, "tokens": len(document), "text": text, "ids": ids})
    return {
        "prefix": str(prefix),
        "dtype": corpus.dtype.name,
        "version": VERSION,
        "sequences": corpus.num_sequences,
        "documents": corpus.num_documents,
        "tokens": corpus.num_tokens,
        "bytes": corpus.bin_bytes,
        "tokens_per_document": spread(np.diff(corpus.document_starts)),
        "ends_with_eod": share,
        "looked_at": num_checked,
        "samples": samples_shown,
    }


def spread(counts: NDArray[np.int64]) -> Facts:
    """Return min, median (the lower of two in the middle), mean and max of counts [n]."""
    if not len(counts):
        return {"min": 0, "median": 0, "mean": 0.0, "max": 0}
    return {
        "min": int(counts.min()),
        "median": int(np.quantile(counts, 0.5, method="lower")),
        "mean": int(counts.sum()) / len(counts),
        "max": int(counts.max()),
    }


def spaced(count: int, limit: int) -> list[int]:
    """Return at most `wanted` numbers below `count`, evenly spaced."""
    number = min(count, limit)
    return [(2 * i + 1) * count // (2 * number) for i in range(number)]
