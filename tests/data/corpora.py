"""Small corpora for the tests of this folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlm.data.indexed import IndexedDataset, IndexedWriter, token_dtype


def write_corpus(
    prefix: Path, documents: Sequence[Sequence[int]], dtype: np.dtype[Any] | None = None
) -> IndexedDataset:
    with IndexedWriter(prefix, dtype or token_dtype(1000)) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def counting_corpus(prefix: Path, lengths: Sequence[int]) -> IndexedDataset:
    """A corpus whose tokens are 0, 1, 2, …, so that a token is its position."""
    ends = np.cumsum(lengths)
    return write_corpus(prefix, [range(end - n, end) for n, end in zip(lengths, ends, strict=True)])
