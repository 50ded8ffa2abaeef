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
    """Their module."""
    return megatron_core("datasets.indexed_dataset")


Documents = Sequence[Sequence[Sequence[int]]]
GPT: Documents = [[[1, 2, 3]], [[]], [[7]], [[50, 60]]]
BERT: Documents = [[[1, 2], [3]], [], [[4], [5, 6], [7]], [[]], [[8]]]
CODES = [code for code, dtype in DTYPES.items() if dtype.kind != "f"]


def write_ours(prefix: Path, documents: Documents, dtype: np.dtype[Any]) -> IndexedDataset:
    with IndexedWriter(prefix, dtype) as writer:
        for sequences in documents:
            writer.add_document([t for s in sequences for t in s], [len(s) for s in sequences])
    return IndexedDataset(prefix)


def write_theirs(prefix: Path, documents: Documents, dtype: np.dtype[Any]) -> Any:
    builder = theirs().IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
    for sequences in documents:
        tokens = torch.tensor([t for s in sequences for t in s], dtype=torch.int64)
        builder.add_document(tokens, [len(s) for s in sequences])
    builder.finalize(f"{prefix}.idx")
    return theirs().IndexedDataset(str(prefix))


def same_bytes(one: Path, other: Path) -> bool:
    return all(
        one.with_suffix(suffix).read_bytes() == other.with_suffix(suffix).read_bytes()
        for suffix in (".bin", ".idx")
    )


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("documents", [GPT, BERT], ids=["gpt", "bert"])
def test_writer_makes_the_bytes_of_their_builder(tmp_path: Path, documents: Documents, code: int) -> None:
    write_ours(tmp_path / "ours", documents, DTYPES[code])
    write_theirs(tmp_path / "theirs", documents, DTYPES[code])
    assert same_bytes(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("documents", [GPT, BERT], ids=["gpt", "bert"])
def test_our_reader_reads_theirs(tmp_path: Path, documents: Documents, code: int) -> None:
    read = write_theirs(tmp_path / "c", documents, DTYPES[code])
    ours = IndexedDataset(tmp_path / "c")
    assert [ours[i].tolist() for i in range(len(ours))] == [read[i].tolist() for i in range(len(read))]
    assert [ours.document(i).tolist() for i in range(ours.num_documents)] == [
        [t for s in document for t in s] for document in documents
    ]


def test_merged_corpora_are_the_bytes_of_their_add_index(tmp_path: Path) -> None:
    shards = [write_ours(tmp_path / f"s{i}", part, DTYPES[8]) for i, part in enumerate((GPT, BERT, GPT))]
    builder = theirs().IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    with IndexedWriter(tmp_path / "ours", DTYPES[8]) as writer:
        for shard in shards:
            builder.add_index(str(shard.prefix))
            writer.append(shard)
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert same_bytes(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("vocab_size", [1, 257, 30_522, 50_257, 65_499, 65_500, 65_536, 256_000])
def test_token_dtype_is_theirs(vocab_size: int) -> None:
    assert token_dtype(vocab_size) == np.dtype(theirs().DType.optimal_dtype(vocab_size))


def test_dtype_codes_are_theirs() -> None:
    assert {code: np.dtype(theirs().DType.dtype_from_code(code)) for code in DTYPES} == DTYPES
