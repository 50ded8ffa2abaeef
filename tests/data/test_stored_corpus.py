"""Corpora in a store: the tokens, samples and digests of the same files on a disk."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from mlm.corpus.inspect import facts_of
from mlm.corpus.recombine import split_corpus
from mlm.data import stored_corpus
from mlm.data.config import DataConfig
from mlm.data.files_present import corpus
from mlm.data.gpt import EvalWindows, GPTDataset
from mlm.data.indexed import IndexedDataset
from mlm.data.sampler import Loader
from mlm.data.stored_corpus import copy_locally
from mlm.util import files
from mlm.util.errors import UserError
from mlm.util.files import sampled_digest, write_atomic
from mlm.util.object_store import CONCURRENT
from tests.data.corpora import write_corpus
from tests.stores import BUCKET, Store, serve

BLOCK = 4096


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    rng = np.random.default_rng(1)
    folder = tmp_path_factory.mktemp("local")
    write_corpus(folder / "validation", [[1, 2, 3]])
    lengths = rng.integers(0, 5000, 40)
    return write_corpus(folder / "train", [rng.integers(0, 1000, n) for n in lengths])


@pytest.fixture(scope="module")
def server(local: IndexedDataset) -> Iterator[Store]:
    with serve() as store:
        store.upload(local.prefix.parent, f"{BUCKET}/corpora/plays")
        yield store


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(stored_corpus, "BLOCK", BLOCK)
    server.reset()
    copy_locally.cache_clear()
    return server


def opened(cache: Path, limit: int = 1 << 30, url: str = f"{BUCKET}/corpora/plays") -> IndexedDataset:
    return IndexedDataset(copy_locally(url, str(cache), limit))


def test_the_tokens_are_those_of_the_file(store: Store, local: IndexedDataset, tmp_path: Path) -> None:
    stored = opened(tmp_path)
    assert stored.dtype == local.dtype
    assert not (stored.prefix.parent / "train.bin").exists()
    np.testing.assert_array_equal(stored.tokens[:], local.tokens)
    np.testing.assert_array_equal(stored.document(7), local.document(7))
    positions = np.random.default_rng(2).integers(0, local.num_tokens, (3, 50))
    np.testing.assert_array_equal(stored.tokens[positions], local.tokens[positions])
    assert stored.max_token() == local.max_token()


def test_samples_and_windows_are_those_of_the_file(
    store: Store, local: IndexedDataset, tmp_path: Path
) -> None:
    stored = opened(tmp_path, url=f"{BUCKET}/corpora/plays/train")
    ids = np.arange(0, 3000, 7)  # several epochs
    for n in (16, 700):
        datasets = [GPTDataset(c, seq_length=n, num_samples=4000, seed=3) for c in (local, stored)]
        np.testing.assert_array_equal(*(dataset.gather(ids) for dataset in datasets))
    windows = [EvalWindows(c, seq_length=64).gather([0, 5, 9]) for c in (local, stored)]
    np.testing.assert_array_equal(*windows)


def test_no_samples_request_no_block(store: Store, tmp_path: Path) -> None:
    stored = opened(tmp_path).stored
    assert stored is not None
    before, none = store.gets, np.empty((0, 2), np.int64)
    stored.load(none, none)
    assert store.gets == before


@pytest.mark.parametrize("whole", [1 << 26, 1 << 10])
def test_the_digest_is_that_of_the_file(
    store: Store, local: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    monkeypatch.setattr(files, "WHOLE", whole)
    monkeypatch.setattr(files, "SAMPLE", 1000)
    assert opened(tmp_path).sampled_digest() == sampled_digest(local.bin_path)


def test_kept_blocks_are_not_requested_again(store: Store, tmp_path: Path) -> None:
    first = opened(tmp_path)
    _ = first.tokens[:]
    blocks = -(-first.bin_bytes // BLOCK)
    assert store.gets == blocks + 2  # and both indices
    copy_locally.cache_clear()  # as another process, and a run that resumes
    np.testing.assert_array_equal(opened(tmp_path).tokens[:], first.tokens[:])
    assert store.gets == blocks + 2
    assert first.stored is not None
    os.umask(mask := os.umask(0))
    modes = {path.stat().st_mode & 0o777 for path in first.stored.folder.iterdir()}
    assert modes == {0o666 & ~mask}  # as of any file: the host's other users may read them


@pytest.mark.parametrize("damaged", [lambda block: b"", lambda block: block[:9] + b"?" + block[10:]])
def test_a_block_that_is_damaged_is_requested_again(
    store: Store, local: IndexedDataset, tmp_path: Path, damaged: Callable[[bytes], bytes]
) -> None:
    stored = opened(tmp_path)
    _ = stored.tokens[:]
    assert stored.stored is not None
    block = stored.stored.folder / "00000003"
    block.write_bytes(damaged(block.read_bytes()))
    np.testing.assert_array_equal(stored.tokens[:], local.tokens)


def test_what_is_kept_stays_below_the_limit(store: Store, local: IndexedDataset, tmp_path: Path) -> None:
    limit = 20 * BLOCK
    stored = opened(tmp_path, limit)
    assert stored.stored is not None
    rng, most = np.random.default_rng(4), 0
    for _ in range(30):
        positions = rng.integers(0, local.num_tokens, 4)
        np.testing.assert_array_equal(stored.tokens[positions], local.tokens[positions])
        most = max(most, sum(each.stat().st_size for each in stored.stored.folder.iterdir()))
    assert 10 * BLOCK < most <= limit


def test_a_block_that_another_rank_deletes_while_it_is_kept_is_read(
    store: Store, local: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small limit a rank makes room among files that others are writing."""
    stored = opened(tmp_path)

    def replace_after_deletion(source: Path, target: Path) -> None:
        source.unlink()
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "replace", replace_after_deletion)
    np.testing.assert_array_equal(stored.tokens[:100], local.tokens[:100])


@pytest.mark.slow
def test_another_state_of_the_corpus_has_a_copy_of_its_own(
    store: Store, local: IndexedDataset, tmp_path: Path
) -> None:
    url = store.upload(local.prefix.parent, f"{BUCKET}/changing")
    before = opened(tmp_path, url=url)
    (tmp_path / "other").mkdir()
    other = write_corpus(tmp_path / "other" / "train", [[5, 6, 7] * 100])
    store.upload(other.prefix.parent, url)
    with pytest.raises(UserError, match="changed while it was read"):
        _ = before.tokens[:]
    copy_locally.cache_clear()
    after = opened(tmp_path, url=url)
    assert after.prefix != before.prefix
    np.testing.assert_array_equal(after.tokens[:], other.tokens)


@pytest.mark.slow
def test_training_does_not_wait_for_a_slow_store_once_warm(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read ahead is trained on while no request is answered, and those wait side by side."""
    monkeypatch.setattr(stored_corpus, "BLOCK", 256)
    dataset = GPTDataset(opened(tmp_path), seq_length=64, num_samples=64 * 8, seed=1)
    answers, arrived, answered = threading.Event(), threading.Semaphore(0), list[int]()

    def answer(number: int) -> None:
        arrived.release()
        answers.wait(30)  # by then the test fails
        answered.append(number)

    answers.set()
    with (
        Loader(
            dataset, consumed_samples=0, global_batch_size=64, micro_batch_size=64, rank=0, size=1
        ) as loader,
        ExitStack() as at_end,
    ):
        at_end.callback(answers.set)
        first = next(loader)
        wait(loader._ahead)  # warm
        answers.clear()
        store.fail = answer
        ahead = [next(loader) for _ in range(3)]
        for _ in range(CONCURRENT):  # of the step after those: at once, though none is answered
            assert arrived.acquire(timeout=20)
        assert answered == []
        answers.set()
        rest = list(loader)
    assert len(answered) > CONCURRENT
    steps = [[int(batch.first_sample) for batch in step] for step in (first, *ahead, *rest)]
    assert steps == [[64 * n] for n in range(8)]


def test_a_cache_that_cannot_be_written_is_one_line(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: Path, **_: bool) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache: \S+: Not a directory; name a folder with room"):
        opened(tmp_path / "file")
    stored = opened(tmp_path / "folder")
    assert stored.stored is not None
    stored.stored.folder.rmdir()
    with pytest.raises(UserError, match=r"data\.cache: \S+blocks\S+: No such file or directory"):
        _ = stored.tokens[:]
    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UserError, match=r"data\.cache: \S+blocks: Permission denied; name a folder"):
        IndexedDataset(stored.prefix)


def test_a_local_copy_is_inspected_as_its_corpus_and_not_recombined(
    store: Store, local: IndexedDataset, tmp_path: Path
) -> None:
    """`data.cache` holds folders that look like corpora, without tokens."""
    copy = opened(tmp_path).prefix
    facts, of_copy = (facts_of(prefix, None, None, 3) for prefix in (local.prefix, copy))
    assert of_copy == facts | {"prefix": str(copy)}
    with pytest.raises(UserError, match=r"train\.bin: its tokens are \S+/plays/train\.bin; copy them"):
        split_corpus(str(copy), str(tmp_path / "out"), "1/1")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_not_an_error_of_the_store(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_on_full_disk(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
        if path.suffix == ".idx":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_atomic(path, content)

    monkeypatch.setattr(stored_corpus, "write_atomic", write_on_full_disk)
    with pytest.raises(UserError, match=r"data\.cache: \S+train\.idx: No space left on device; name"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{}, {"train": "corpora/plays/train"}, {"kind": "synthetic"}],
    ids=["path", "train", "synthetic"],
)
def test_a_store_needs_a_local_folder(changes: dict[str, str]) -> None:
    """Beside data.train, and of synthetic data, the tokenizer of data.path is read."""
    problem = corpus(DataConfig(path=f"{BUCKET}/corpora/plays", **changes))  # type: ignore[arg-type]
    assert problem is not None
    assert problem.keys == ("data.cache", "data.path")
    assert problem.fix == "give one on a local disk: data.cache=FOLDER"
