"""`mlm data build` of objects in a store: the corpus of the same files on a disk."""

import gzip
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlm.corpus.build import run_build
from mlm.corpus.read.finding import search
from mlm.util.errors import UserError
from tests.corpus.texts import TEXTS, plain, quiet, write_jsonl
from tests.stores import BUCKET, Store, serve


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with serve() as store:
        yield store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with two parts, one compressed, and a file that is neither."""
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    folder = tmp_path / "text"
    write_jsonl(folder / "train.jsonl", TEXTS)
    (folder / "validation.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a held-out cat"}\n' * 3))
    (folder / "notes.md").write_text("none")
    table = pyarrow.table({"text": [text * 3 for text in TEXTS]})
    (folder / "more").mkdir()
    parquet.write_table(table, folder / "more" / "rows.parquet")
    with pyarrow.CompressedOutputStream(str(folder / "more" / "lines.jsonl.zst"), "zstd") as f:
        f.write(b'{"text": "that hat"}\n' * 4)
    return folder


def test_a_build_from_a_store_equals_one_from_a_disk(store: Store, source: Path) -> None:
    url = store.upload(source, f"{BUCKET}/text")
    config = plain(source)
    store.fail = lambda number: b"500 InternalError" if number % 3 == 0 else None
    for name, place in (("local", str(source)), ("stored", url)):
        run_build(replace(config, input=f"{place}/more", out=str(source.parent / name)), quiet())
    for name in ("train.bin", "train.idx"):
        assert (source.parent / "stored" / name).read_bytes() == (source.parent / "local" / name).read_bytes()
    assert store.gets > 0


def test_an_object_that_changed_rejects_the_build(store: Store, source: Path) -> None:
    from mlm.corpus.read.shards import check_unchanged

    url = store.upload(source, f"{BUCKET}/changing")
    (first, *_) = search(url).inputs
    check_unchanged(first)
    write_jsonl(source / "train.jsonl", [*TEXTS, "another"])
    store.upload(source, url)
    with pytest.raises(UserError, match="changed while the build read it"):
        check_unchanged(first)
