"""`mlm pretrain` on a corpus in a store: the losses of the same corpus on a disk, and its errors."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlm.config.cli import main
from mlm.data import receipt, stored_corpus
from mlm.data.stored_corpus import mirror
from mlm.util import files
from tests.stores import BUCKET, KEY, SECRET, Store, serve
from tests.training.blended import segments, write_corpora
from tests.training.pretrain.test_blended_command import TINY
from tests.training.records import records

URL = f"{BUCKET}/wiki"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def server(corpora: Path) -> Iterator[Store]:
    with serve() as store:
        store.put(corpora / "wiki", URL)
        yield store


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(stored_corpus, "BLOCK", 64)
    server.reset()
    mirror.cache_clear()
    return server


def losses(out: Path) -> list[float]:
    return [record["loss"] for kind in ("train", "validation") for record in records(str(out), kind)]


def test_losses_are_those_of_the_corpus_on_a_disk_through_failures_and_a_resume(
    store: Store, corpora: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", *TINY, f"data.path={corpora / 'wiki'}", f"out={tmp_path / 'local'}"]) == 0
    store.fail = lambda number: "truncate" if number % 5 == 0 else None
    words = [*TINY, f"data.path={URL}", f"data.cache={tmp_path / 'cache'}", f"out={tmp_path / 'stored'}"]
    assert main(["pretrain", *words, "train.steps=3"]) == 0
    assert main(["pretrain", *words]) == 0
    assert losses(tmp_path / "stored") == losses(tmp_path / "local")
    (segment,) = segments(tmp_path / "stored")
    assert segment["sources"][0]["path"] == f"{URL}/train"
    printed = "".join(capfd.readouterr())
    saved = [path.read_bytes() for path in (tmp_path / "stored").rglob("*") if path.is_file()]
    assert not any(secret in printed for secret in (KEY, SECRET))
    assert not any(secret.encode() in content for secret in (KEY, SECRET) for content in saved)


def test_credentials_revoked_in_a_run_end_it_with_one_line(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for module in (files, receipt):  # the checks before the run read two samples
        monkeypatch.setattr(module, "WHOLE", 0)
    monkeypatch.setattr(files, "SAMPLES", 2)
    monkeypatch.setattr(files, "SAMPLE", 8)
    store.fail = lambda number: b"403 InvalidAccessKeyId" if number >= 8 else None
    words = [*TINY, f"data.path={URL}", f"data.cache={tmp_path / 'cache'}", f"out={tmp_path / 'out'}"]
    assert main(["pretrain", *words]) in (1, 2)
    printed = "".join(capfd.readouterr())
    assert f"{URL}/train.bin: access denied (InvalidAccessKeyId); give credentials" in printed
    assert "Traceback" not in printed
    assert KEY not in printed
