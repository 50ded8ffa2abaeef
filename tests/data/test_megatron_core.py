"""Our .bin/.idx against the real thing: megatron-core's reader and builder, both ways."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlm.data.indexed import DTYPES, IndexedDataset, IndexedWriter, token_dtype
from tests.megatron_core import megatron_core


def theirs() -> Any:
    return megatron_core("datasets.indexed_dataset")


Documents = Sequence[Sequence[Sequence[int]]]
GPT: Documents = [[[1, 2, 3]], [[]], [[7]], [[50, 60]]]
BERT: Documents = [[[1, 2], [3]], [], [[4], [5, 6], [7]], [[]], [[8]]]
CODES = [code for code, dtype in DTYPES.items() if dtype.kind != "f"]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("documents", [GPT, BERT], ids=["gpt", "bert"])
def test_both_write_the_same_bytes_and_read_the_same_documents(
    tmp_path: Path, documents: Documents, code: int
) -> None:
    builder = theirs().IndexedDatasetBuilder(f"{tmp_path / 'theirs'}.bin", dtype=DTYPES[code].type)
    with IndexedWriter(tmp_path / "ours", DTYPES[code]) as writer:
        for sequences in documents:
            tokens, lengths = [t for s in sequences for t in s], [len(s) for s in sequences]
            writer.add_document(tokens, lengths)
            builder.add_document(torch.tensor(tokens, dtype=torch.int64), lengths)
    builder.finalize(f"{tmp_path / 'theirs'}.idx")
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    ours, read = IndexedDataset(tmp_path / "ours"), theirs().IndexedDataset(str(tmp_path / "theirs"))
    assert ours.dtype == DTYPES[code]
    assert [ours[i].tolist() for i in range(len(ours))] == [read[i].tolist() for i in range(len(read))]
    assert [ours.document(i).tolist() for i in range(ours.num_documents)] == [
        [t for s in document for t in s] for document in documents
    ]


@pytest.mark.parametrize("vocab_size", [1, 65_499, 65_500, 65_536])
def test_token_dtype_is_theirs(vocab_size: int) -> None:
    assert token_dtype(vocab_size) == np.dtype(theirs().DType.optimal_dtype(vocab_size))


def test_dtype_codes_are_theirs() -> None:
    assert {code: np.dtype(theirs().DType.dtype_from_code(code)) for code in DTYPES} == DTYPES
