"""Megatron's .bin/.idx: bytes, round trips and what damage is noticed."""

import struct
from pathlib import Path

import numpy as np
import pytest

from mlm.data.indexed import DTYPES, IndexedDataset, IndexedWriter, token_dtype
from mlm.util.errors import CorruptFileError, UserError
from tests.data.corpora import write_corpus

DOCUMENTS = [[1, 2, 3], [], [7], [500, 600]]


def hand_made_index() -> bytes:
    """The .idx of DOCUMENTS, packed by hand from Megatron's layout."""
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 5)
    return head + struct.pack("<4i4q5q", 3, 0, 1, 2, 0, 6, 6, 8, 0, 1, 2, 3, 4)


def test_max_token_looks_at_the_whole_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlm.data.indexed.CHUNK", 2)
    assert write_corpus(tmp_path / "c", [[1, 900, 2], [5]]).max_token() == 900
    with pytest.raises(CorruptFileError, match="token id -2"):
        write_corpus(tmp_path / "d", [[1, -2]], DTYPES[4]).max_token()


def test_truncated_bin_names_file_and_both_sizes(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", DOCUMENTS)
    (tmp_path / "c.bin").write_bytes(b"12345")
    with pytest.raises(CorruptFileError, match=r"c\.bin is truncated: expected 12 bytes .* found 5; .*build"):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize("size", [3, 20, 40, -1])
def test_truncated_index_is_rejected(tmp_path: Path, size: int) -> None:
    write_corpus(tmp_path / "c", DOCUMENTS)
    (tmp_path / "c.idx").write_bytes(hand_made_index()[:size])
    with pytest.raises(CorruptFileError, match=r"c\.idx"):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"PK", "not an indexed corpus"),
        (9, b"\x02", "version 2"),
        (17, b"\x06", r"dtype code 6 \(float64\)"),
        (17, b"\x04", "pointers do not follow"),  # i32 where u16 was written
        (34, struct.pack("<i", 4), "pointers do not follow"),
        (50 + 8, struct.pack("<q", 2), "pointers do not follow"),
        (82, struct.pack("<q", 1), "document boundaries"),
        (82 + 32, struct.pack("<q", 9), "document boundaries"),
    ],
)
def test_altered_index_is_rejected(tmp_path: Path, at: int, new: bytes, message: str) -> None:
    write_corpus(tmp_path / "c", DOCUMENTS)
    index = hand_made_index()
    (tmp_path / "c.idx").write_bytes(index[:at] + new + index[at + len(new) :])
    with pytest.raises(CorruptFileError, match=message):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize("documents", [[], [[], []]])
def test_empty_corpus_is_a_users_mistake(tmp_path: Path, documents: list[list[int]]) -> None:
    with pytest.raises(UserError, match="empty"):
        write_corpus(tmp_path / "c", documents)


def test_writer_leaves_the_previous_corpus_alone_on_an_exception(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", DOCUMENTS)
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(tmp_path / "c", token_dtype(9)):
        raise RuntimeError("stop")
    assert IndexedDataset(tmp_path / "c").num_tokens == 6


@pytest.mark.parametrize("tokens", [[70_000], [-1], np.array([1 << 20])])
def test_writer_rejects_tokens_that_would_wrap(tmp_path: Path, tokens: list[int]) -> None:
    with (
        pytest.raises(ValueError, match="do not fit uint16"),
        IndexedWriter(tmp_path / "c", token_dtype(9)) as writer,
    ):
        writer.add_document(tokens)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kernel", [True, False])
def test_merged_shards_are_the_bytes_of_one_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    """With and without copying by the kernel; some shards are empty."""
    if not kernel:
        monkeypatch.setattr("os.copy_file_range", lambda *args: (_ for _ in ()).throw(OSError(18, "EXDEV")))
    monkeypatch.setattr("mlm.data.indexed.CHUNK", 2)
    documents = [([1, 2, 3], [1, 2]), ([], []), ([4], [1]), ([5, 6], [0, 2, 0]), ([7] * 9, [4, 5])]
    shards = [documents[:2], [], documents[2:4], documents[4:]]
    for number, shard in enumerate(shards):
        with IndexedWriter(tmp_path / f"s{number}", DTYPES[8]) as writer:
            for tokens, lengths in shard:
                writer.add_document(tokens, lengths)
    with IndexedWriter(tmp_path / "whole", DTYPES[8]) as writer:
        for tokens, lengths in documents:
            writer.add_document(tokens, lengths)
    with IndexedWriter(tmp_path / "merged", DTYPES[8]) as writer:
        for number in range(len(shards)):
            writer.append(IndexedDataset(tmp_path / f"s{number}", allow_empty=True))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_shard_cut_short_while_it_is_merged_is_rejected(tmp_path: Path) -> None:
    shard = write_corpus(tmp_path / "s", [[1, 2, 3]])
    (tmp_path / "s.bin").write_bytes(b"12")
    with (
        pytest.raises(CorruptFileError, match=r"s\.bin is truncated: expected 6 bytes, found 2"),
        IndexedWriter(tmp_path / "c", shard.dtype) as writer,
    ):
        writer.append(shard)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["s.bin", "s.idx"]
