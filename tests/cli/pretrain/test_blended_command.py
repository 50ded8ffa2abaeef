"""`mlm pretrain` on several corpora: what it reports, and what its files say."""

import json
import math
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.util.files import digest_file
from tests.training.blended import VOCAB, segments, write_corpora
from tests.training.records import records

TINY = [
    *("model=gpt2_tiny", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2"),
    *(f"model.vocab_size={VOCAB}", "model.max_positions=4", "data.seq_length=4"),
    *("train.global_batch_size=8", "train.micro_batch_size=4", "train.steps=6", "train.validate_every=3"),
    *("train.validate_batches=2", "checkpoint.save_every=3", "checkpoint.keep_last=9", "schedule=constant"),
    *("schedule.warmup_steps=0", "optimizer.lr=1e-2", "log.every=1"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


def pretrain(*words: str) -> None:
    assert main(["pretrain", *TINY, *words]) == 0


@pytest.fixture(scope="module")
def blended(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "blended"
    pretrain(f"data.blend=[0.3 {made}/wiki,0.7 {made}/web]", f"out={out}")
    return out


def test_the_command_reports_every_corpus_and_their_mean(blended: Path) -> None:
    for record in records(str(blended), "validation"):
        wiki, web = record["validation/wiki"], record["validation/web"]
        assert record["loss"] == pytest.approx(0.3 * wiki + 0.7 * web, rel=1e-12)
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
        assert wiki != web


def test_a_corpus_is_scored_as_mlm_eval_loss_does(blended: Path, made: Path, tmp_path: Path) -> None:
    """Its validation set has fewer windows than validate_batches asks for: all count."""
    path = f"path={made}/web/validation"
    assert main(["eval", "loss", f"ckpt={blended}", path, f"out={tmp_path / 'score.json'}"]) == 0
    score = json.loads((tmp_path / "score.json").read_text())
    assert score["loss"] == pytest.approx(records(str(blended), "validation")[-1]["validation/web"], rel=1e-6)
    assert score["corpus_digest"] == digest_file(made / "web" / "validation.bin")
    assert score["corpus_index_digest"] == digest_file(made / "web" / "validation.idx")
    assert score["corpus_receipt_digest"] == digest_file(made / "web" / "corpus.json")
    assert [(c["name"], c["weight"], c["receipt"]) for c in score["trained_on"]] == [
        ("wiki", 0.3, digest_file(made / "wiki" / "corpus.json")),
        ("web", 0.7, digest_file(made / "web" / "corpus.json")),
    ]


def test_the_scores_of_a_blend_do_not_replace_each_other(blended: Path, made: Path) -> None:
    for name in ("wiki", "web"):
        assert main(["eval", "loss", f"ckpt={blended}", f"path={made}/{name}/validation"]) == 0
        assert (blended / f"eval-loss-{name}-validation.json").exists()


def test_receipts_travel_into_checkpoint_and_records(blended: Path, made: Path) -> None:
    (segment,) = segments(blended)
    receipt = digest_file(made / "wiki" / "corpus.json")
    wiki = segment["sources"][0]
    assert (wiki["receipt"], wiki["tokens"]) == (receipt, digest_file(made / "wiki" / "train.bin"))
    assert records(str(blended), "run")[0]["corpora"][0]["receipt"] == receipt


def test_a_validation_set_that_is_named_is_the_only_one(made: Path, tmp_path: Path) -> None:
    blend, named = f"data.blend=[{made}/wiki,{made}/web]", f"data.validation={made}/code/validation"
    pretrain(blend, named, f"out={tmp_path / 'run'}", "train.steps=1", "train.validate_every=1")
    (record,) = records(str(tmp_path / "run"), "validation")
    assert set(record) == {"kind", "time", "step", "loss", "perplexity"}
