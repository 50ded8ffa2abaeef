"""Blocks of plain and compressed files, and lines of bounded length."""

import bz2
import gzip
import lzma
import random
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from mlm.corpus.read.streams import lines
from mlm.data import streams
from mlm.data.streams import DamagedError, blocks
from tests.corpus.reading import write
from tests.slow import thinned

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


def sound_part(path: Path) -> bytes:
    """Return the content before the damage."""
    got = list[bytes]()

    def gather() -> None:
        got.extend(blocks(str(path)))

    with pytest.raises(DamagedError):
        gather()
    return b"".join(got)


@pytest.mark.parametrize("suffix", PACKED)
def test_members_and_frames_follow_each_other(tmp_path: Path, suffix: str) -> None:
    parts = packed(suffix, b"one") + packed(suffix, b"") + packed(suffix, CONTENT) + packed(suffix, b"two")
    assert content_of(write(tmp_path / f"a{suffix}", parts)) == b"one" + CONTENT + b"two"


@pytest.mark.parametrize("suffix", PACKED)
def test_packed_file_of_no_bytes_is_damaged(tmp_path: Path, suffix: str) -> None:
    assert sound_part(write(tmp_path / f"a{suffix}", b"")) == b""
    assert content_of(write(tmp_path / f"b{suffix}", packed(suffix, b""))) == b""


def test_zeros_may_pad_a_gzip_file(tmp_path: Path) -> None:
    assert content_of(write(tmp_path / "a.gz", gzip.compress(b"one") + bytes(1000))) == b"one"


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
@pytest.mark.parametrize("keep", [0.4, 0.999])
def test_truncated_file_gives_what_came_before(tmp_path: Path, suffix: str, keep: float) -> None:
    file = packed(suffix, CONTENT[:300_000])
    got = sound_part(write(tmp_path / f"a{suffix}", file[: int(len(file) * keep)]))
    assert CONTENT.startswith(got)
    assert len(got) > keep * 300_000 - 150_000  # a block of Zstandard's own is 128 KiB


@pytest.mark.parametrize("suffix", PACKED)
def test_file_of_another_type_is_damaged(tmp_path: Path, suffix: str) -> None:
    assert sound_part(write(tmp_path / f"a{suffix}", b'{"text": "plain"}\n' * 100)) == b""


@pytest.mark.parametrize("suffix", PACKED)
def test_what_follows_the_last_member_is_damage(tmp_path: Path, suffix: str) -> None:
    sound_part(write(tmp_path / f"a{suffix}", packed(suffix, CONTENT) + b"no header"))


@pytest.mark.parametrize("suffix", thinned(PACKED, 2))
def test_bomb_is_unpacked_block_by_block(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", packed(suffix, bytes(1 << 26)))
    assert path.stat().st_size < 1 << 17
    assert max(map(len, blocks(str(path)))) <= streams.BLOCK


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_do_not_depend_on_blocks(size: int) -> None:
    content = b"one\n\ntwo\r\n\n a long line \nlast"
    pieces = (content[i : i + size] for i in range(0, len(content), size))
    assert [line for line, _ in lines(pieces, 100)] == content.split(b"\n")


@pytest.mark.parametrize("size", [1, 4, 100])
def test_lines_above_the_bound_are_dropped(size: int) -> None:
    content = b"12345\n123456\n1\n1234567890\n123456"
    pieces = (content[i : i + size] for i in range(0, len(content), size))
    assert list(lines(pieces, 5)) == [(b"12345", 6), (None, 7), (b"1", 2), (None, 11), (None, 6)]


def test_line_above_the_bound_is_not_held() -> None:
    block = b"x" * (1 << 16)
    tracemalloc.start()
    try:
        assert list(lines((block for _ in range(1000)), 1 << 18)) == [(None, 1000 << 16)]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def wide_window(suffix: str) -> bytes:
    """A sound file that no reader unpacks within 128 MiB."""
    if suffix == ".xz":
        return lzma.compress(b"a", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 28}])
    how = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=how).compressobj()
    return compressor.compress(b"a") + compressor.flush()


@pytest.mark.parametrize("suffix", [".xz", ".zst"])
def test_a_file_that_takes_too_much_memory_is_not_read(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(DamagedError, match=r"[Mm]emory"):
        content_of(write(tmp_path / f"a{suffix}", wide_window(suffix)))
