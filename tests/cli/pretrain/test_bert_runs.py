"""BERT from text to score, by the commands: corpus, pretraining, validation, `mlm eval loss`."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlm.checkpoint.native.save_load import resolve
from mlm.cli import main
from mlm.cli.compose.composition import load_config
from mlm.cli.evaluate.loss import preflight
from mlm.corpus.train_tokenizer import train_bpe
from mlm.data.blend_history import seed_of
from mlm.data.sampler import eval_batches
from mlm.models.bert.samples import BERTSamples
from mlm.parallel.mesh import shape_context
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import (
    corpora,
    corpus_problems,
    corpus_samples,
    sources,
    train_dataset,
    validation_sets,
)
from mlm.training.state import load_weights
from mlm.training.trainer import Trainer
from tests.training.records import records

WORDS = """
sun moon star sea river stone tree bird wolf king queen crown sword night day wind rain snow
""".split()  # noqa: SIM905


def story(rng: random.Random) -> str:
    sentences = (" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) for _ in range(rng.randint(6, 14)))
    return " ".join(sentence.capitalize() + "." for sentence in sentences)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of sentences as `mlm data build` writes it, with a validation part."""
    root, rng = tmp_path_factory.mktemp("bert"), random.Random(0)
    for part, count in (("train", 60), ("validation", 12)):
        lines = (json.dumps({"text": story(rng)}) for _ in range(count))
        (root / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    wordpiece = str(root / "wordpiece.json")
    words = [f"input={root}/train.jsonl", "kind=wordpiece", "vocab_size=120", f"out={wordpiece}"]
    assert main(["data", "tokenizer", *words]) == 0
    build = [f"input={root}", f"tokenizer={wordpiece}", "sentences=true", "append_eod=false", "recipe=plain"]
    assert main(["data", "build", *build, f"out={root}/corpus"]) == 0
    return root / "corpus"


def typed(corpus: Path, *more: str) -> list[str]:
    return [
        *("model=bert_tiny", "model.vocab_size=256", "model.hidden_size=32", "data.seq_length=32"),
        *("train.global_batch_size=4", "train.micro_batch_size=2", "train.validate_batches=2"),
        "schedule=constant",
        *([] if any("data." in word for word in more) else [f"data.path={corpus}"]),
        *more,
    ]


def spec(corpus: Path, *more: str) -> PretrainConfig:
    config: PretrainConfig = load_config("pretrain", typed(corpus, *more))
    return config


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "bert"
    words = typed(corpus, "train.steps=6", "train.validate_every=3", "log.every=1", f"out={out}")
    assert main(["pretrain", *words]) == 0
    return out


def test_both_losses_and_accuracies_are_logged_and_validated(run: Path) -> None:
    steps, validations = records(run, "step"), records(run, "validation")
    assert len(steps) == 6
    assert len(validations) == 2
    for record in steps:
        assert record["loss"] == pytest.approx(record["mlm_loss"] + record["sop_loss"])
        assert 0 <= record["mlm_accuracy"] <= 1
        assert 0 <= record["sop_accuracy"] <= 1
    for record in validations:
        assert record["loss"] == pytest.approx(record["validation/mlm_loss"] + record["validation/sop_loss"])
        assert record["perplexity"] == pytest.approx(np.exp(record["validation/mlm_loss"]))
    assert steps[0]["mlm_loss"] == pytest.approx(np.log(256), rel=0.05)
    assert steps[0]["sop_loss"] == pytest.approx(np.log(2), rel=0.05)


def test_a_score_is_the_mean_over_all_samples(run: Path, corpus: Path, tmp_path: Path) -> None:
    """Against the batches of the validation set summed here, one sample at a time."""
    words = [f"ckpt={run}", f"path={corpus}/validation", f"out={tmp_path / 'score.json'}"]
    assert main(["eval", "loss", *words]) == 0
    found = json.loads((tmp_path / "score.json").read_text())
    config = spec(corpus, "precision=fp64")
    trainer = Trainer(config, shape_context())
    load_weights(tuple(trainer.shards), resolve(run), trainer.ctx)
    (part,) = validation_sets(config)
    batches = eval_batches(part.windows, micro_batch_size=1, rank=0, size=1)
    sums, masked, samples = np.zeros(4), 0, 0
    for batch in batches:
        masked_here, one, *_ = trainer.objective.counts(batch)
        assert one == 1
        sums += trainer.objective.sums(trainer.model.chunks[0], batch, None).numpy()
        masked, samples = masked + masked_here, samples + 1
    assert (found["tokens"], found["samples"]) == (masked, samples)
    expected = sums / [masked, samples, masked, samples]
    names = ("mlm_loss", "sop_loss", "mlm_accuracy", "sop_accuracy")
    assert [found[name] for name in names] == pytest.approx(expected.tolist(), abs=1e-5)
    assert found["loss"] == pytest.approx(found["mlm_loss"] + found["sop_loss"])


def test_a_blend_of_corpora_has_the_samples_of_each(corpus: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(corpus, tmp_path / "twin")
    config = spec(corpus, f"data.blend=[0.25 {corpus},0.75 {twin}]")
    blend = train_dataset(config, 40)
    source, number = blend.locate(np.arange(40))  # type: ignore[attr-defined]
    samples = blend.gather(np.arange(40))
    assert isinstance(samples, BERTSamples)
    assert set(source) == {0, 1}
    own = [
        corpus_samples(config, corpus.train, 40, seed_of(known, config.seed))
        for corpus, known in zip(corpora(config.data), sources(config.data), strict=True)
    ]
    for k in range(40):
        expected = own[source[k]].gather([number[k]])
        assert isinstance(expected, BERTSamples)
        np.testing.assert_array_equal(samples.tokens[k], expected.tokens[0])
        np.testing.assert_array_equal(samples.labels[k], expected.labels[0])
        assert samples.is_swapped[k] == expected.is_swapped[0]


def test_documents_that_are_not_split_and_a_tokenizer_without_a_mask_are_rejected(
    corpus: Path, tmp_path: Path
) -> None:
    receipt = json.loads((corpus / "corpus.json").read_text())
    whole = shutil.copytree(corpus, tmp_path / "whole")
    (whole / "corpus.json").write_text(json.dumps(receipt | {"sentences": False}))
    assert "sentences=true" in "\n".join(corpus_problems(spec(whole)))
    config = spec(corpus)
    assert corpus_problems(config) == []
    (tmp_path / "bpe.json").write_bytes(train_bpe(["a story of the sea " * 50], 300).content)
    config = replace(config, data=replace(config.data, tokenizer=str(tmp_path / "bpe.json")))
    assert "[MASK]" in "\n".join(corpus_problems(config))


def test_a_score_needs_the_tokenizer_before_ranks_start(run: Path, corpus: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(run, tmp_path / "run")
    (bare / "tokenizer.json").unlink()
    (problem,) = preflight(load_config("eval_loss", [f"ckpt={bare}", f"path={corpus}/validation"]))
    assert "tokenizer=" in problem
