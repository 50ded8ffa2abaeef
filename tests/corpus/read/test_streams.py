"""Blocks of plain and compressed files, and lines of bounded length."""

import bz2
import gzip
import lzma
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from mlm.corpus.read.read import lines
from mlm.data import streams
from mlm.data.streams import DamagedError, blocks
from tests.corpus.reading import write

PACKED = [".gz", ".zst", ".bz2", ".xz"]
CONTENT = random.Random(0).randbytes(300_000) + bytes(700_000)


def packed(suffix: str, content: bytes) -> bytes:
    pack = {
        "": bytes,
        ".gz": gzip.compress,
        ".zst": zstandard.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
    }
    return pack[suffix](content)


def content_of(path: Path, begin: int = 0) -> bytes:
    return b"".join(blocks(str(path), begin=begin))


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], float]] = {
    "no bytes": (lambda file: b"", 0),
    "of another type": (lambda file: b'{"text": "plain"}\n' * 100, 0),
    "truncated": (lambda file: file[: len(file) * 2 // 5], 0.4),
    "without its end": (lambda file: file[: int(len(file) * 0.999)], 0.999),
    "continued": (lambda file: file + b"no header", 1),
}
"""What befalls a file, and the share of its content that is read before the damage is found."""


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("suffix", PACKED)
def test_damaged_file_gives_what_came_before(tmp_path: Path, suffix: str, damage: str) -> None:
    change, share = DAMAGED[damage]
    path, got = write(tmp_path / f"a{suffix}", change(packed(suffix, CONTENT[:300_000]))), bytearray()
    with pytest.raises(DamagedError):  # noqa: PT012
        for block in blocks(str(path)):
            got += block
    assert CONTENT.startswith(got)
    if suffix != ".bz2" or share in (0, 1):  # its blocks are of 900 kB, Zstandard's of 128 KiB
        assert share * 300_000 - 150_000 < len(got) <= share * 300_100


@pytest.mark.parametrize("suffix", PACKED)
def test_members_and_frames_follow_each_other(tmp_path: Path, suffix: str) -> None:
    parts = packed(suffix, b"one") + packed(suffix, b"") + packed(suffix, CONTENT) + packed(suffix, b"two")
    assert content_of(write(tmp_path / f"a{suffix}", parts)) == b"one" + CONTENT + b"two"


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_bomb_is_unpacked_block_by_block(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", packed(suffix, bytes(1 << 26)))
    assert path.stat().st_size < 1 << 17
    assert max(map(len, blocks(str(path)))) <= streams.BLOCK


@pytest.mark.parametrize("size", [1, 3, 100])
def test_lines_do_not_depend_on_blocks(size: int) -> None:
    content = b"one\n\ntwo\r\n\n a long line \nlast"
    pieces = (content[i : i + size] for i in range(0, len(content), size))
    assert [line for line, _ in lines(pieces, 100)] == content.split(b"\n")


def test_line_above_the_bound_is_not_held() -> None:
    block = b"x" * (1 << 16)
    tracemalloc.start()
    try:
        assert list(lines((block for _ in range(1000)), 1 << 18)) == [(None, 1000 << 16)]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_whose_window_takes_more_than_128_mib_is_not_read(tmp_path: Path) -> None:
    how = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=how).compressobj()
    xz = lzma.compress(b"a", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 28}])
    for suffix, file in ((".xz", xz), (".zst", compressor.compress(b"a") + compressor.flush())):
        with pytest.raises(DamagedError, match=r"[Mm]emory"):
            content_of(write(tmp_path / f"a{suffix}", file))
