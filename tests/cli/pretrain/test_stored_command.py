"""`mlm pretrain` on a corpus in a store: the losses of the same corpus on a disk, and its errors."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.data import receipt, stored_corpus
from mlm.data.stored_corpus import copy_locally
from mlm.util import files
from mlm.util.files import digest_file
from tests.cli.pretrain.test_blended_command import TINY
from tests.slow import thinned
from tests.stores import BUCKET, KEY, SECRET, Store, serve
from tests.training.blended import segments, write_corpora
from tests.training.records import records

URL = f"{BUCKET}/wiki"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def server(corpora: Path) -> Iterator[Store]:
    with serve() as store:
        for name in ("wiki", "web"):
            store.upload(corpora / name, f"{BUCKET}/{name}")
        yield store


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(stored_corpus, "BLOCK", 64)
    server.reset()
    copy_locally.cache_clear()
    return server


def losses(out: Path) -> list[float]:
    return [record["loss"] for kind in ("step", "validation") for record in records(str(out), kind)]


@pytest.mark.slow
def test_losses_are_those_of_the_corpus_on_a_disk_through_failures_and_a_resume(
    store: Store, corpora: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", *TINY, f"data.path={corpora / 'wiki'}", f"out={tmp_path / 'local'}"]) == 0
    store.fail = lambda number: "truncate" if number % 5 == 0 else None
    words = [*TINY, f"data.path={URL}", f"data.cache={tmp_path / 'cache'}", f"out={tmp_path / 'stored'}"]
    assert main(["pretrain", *words, "train.steps=3"]) == 0
    assert main(["pretrain", *words, "data.cache_gb=1e-6"]) == 0  # which may change
    assert losses(tmp_path / "stored") == losses(tmp_path / "local")
    (segment,) = segments(tmp_path / "stored")
    assert segment["sources"][0]["path"] == f"{URL}/train"
    printed = "".join(capfd.readouterr())
    saved = [path.read_bytes() for path in (tmp_path / "stored").rglob("*") if path.is_file()]
    assert not any(secret in printed for secret in (KEY, SECRET))
    assert not any(secret.encode() in content for secret in (KEY, SECRET) for content in saved)


def test_a_blend_and_prefixes_in_a_store_are_those_on_a_disk(
    store: Store, corpora: Path, tmp_path: Path
) -> None:
    for name, root in (("local", str(corpora)), ("stored", BUCKET)):
        blend = f"data.blend=[0.3 {corpora}/wiki,0.7 {root}/web/train]"
        typed = [blend, f"data.validation={root}/web/validation"]
        out = [f"data.cache={tmp_path / 'cache'}", f"out={tmp_path / name}"]
        assert main(["pretrain", *TINY, *typed, *out, "train.steps=3"]) == 0
    assert losses(tmp_path / "stored") == losses(tmp_path / "local")
    assert len(losses(tmp_path / "stored")) == 4


def test_eval_loss_scores_the_validation_set_in_the_store(
    store: Store, corpora: Path, tmp_path: Path
) -> None:
    out, score = tmp_path / "out", tmp_path / "score.json"
    words = [f"data.path={URL}", f"data.cache={tmp_path / 'cache'}", f"out={out}", "train.steps=3"]
    assert main(["pretrain", *TINY, *words]) == 0
    assert main(["eval", "loss", f"ckpt={out}", f"out={score}"]) == 0
    result = json.loads(score.read_text())
    assert result["loss"] == pytest.approx(losses(out)[-1], rel=1e-6)
    assert result["corpus_digest"] == digest_file(corpora / "wiki/validation.bin")


@pytest.mark.parametrize(
    ("word", "line"),
    thinned(
        [
            (f"data.validation={URL}", f"data.validation={URL}: a folder; give the prefix of .bin and .idx"),
            (f"data.blend=[1 {BUCKET}/none]", f"data: {BUCKET}/none: neither train.bin and train.idx in it"),
            (
                "data.blend=[1 s3:/bucket/a]",
                "s3:/bucket/a: no URL of an object store; write data.blend=s3://",
            ),
            (f"data.blend=[1 {URL}]", "data.cache is not set: a corpus in a store is read by way"),
        ],
        3,
    ),
)
def test_what_is_no_corpus_in_a_store_is_one_line(
    store: Store, corpora: Path, tmp_path: Path, word: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = [] if "blend" in word or "train" in word else [f"data.path={URL}"]
    cache = f"data.cache={'null' if 'not set' in line else tmp_path / 'cache'}"
    assert main(["pretrain", *TINY, *path, cache, word, f"out={tmp_path / 'out'}"]) == 2
    printed = capfd.readouterr().err
    assert line in printed
    assert "Traceback" not in printed


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
