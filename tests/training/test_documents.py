"""Documents kept apart in a run: where their end comes from, what is scored, and what is said without it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native.save_load import latest_checkpoint, read_manifest
from mlm.cli import main
from mlm.corpus.train_tokenizer import train_bpe
from mlm.data.config import DataConfig
from mlm.data.sampler import Batch, SyntheticDataset, eval_batches
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.corpora import corpus_problems, fill_eod_id
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from tests.data.corpora import write_corpus
from tests.ranks import run_on_ranks
from tests.training.records import records
from tests.verify.parity_layouts import EOD, SEQ, VOCAB_OF_DOCUMENTS, Layout

SAMPLES = 8
SWITCHES = ("reset_positions", "reset_attention", "mask_eod_loss")


def corpus(folder: Path, **receipt: Any) -> Path:
    """A corpus of 40 documents that end with token 3, and a receipt that says so and more."""
    folder.mkdir(exist_ok=True)
    for part in ("train", "validation"):
        write_corpus(folder / part, [[4 + n % 7] * (n % 11) + [3] for n in range(40)])
    said = {"vocab_size": VOCAB_OF_DOCUMENTS, "eod_id": 3, **receipt}
    (folder / "corpus.json").write_text(json.dumps({k: v for k, v in said.items() if v is not None}))
    return folder


def test_the_receipt_says_what_ends_a_document(tmp_path: Path) -> None:
    """Of a folder, a prefix and a blend; nothing is read where documents play no part."""
    one, other = corpus(tmp_path / "one"), corpus(tmp_path / "other")
    data = DataConfig(path=str(one), reset_attention=True)
    assert fill_eod_id(data) == replace(data, eod_id=3)
    assert fill_eod_id(DataConfig(train=str(one / "train"), mask_eod_loss=True)).eod_id == 3
    blend = (f"0.3 {one}", f"0.7 {other}")
    assert fill_eod_id(DataConfig(blend=blend, mask_eod_loss=True)).eod_id == 3
    (one / "corpus.json").write_text("damaged")
    assert fill_eod_id(DataConfig(path=str(one))) == DataConfig(path=str(one))


def test_without_a_receipt_the_tokenizer_says_it(tmp_path: Path) -> None:
    corpus(tmp_path, eod_id=None)
    tokenizer = train_bpe(["a b c"], 258)
    tokenizer.save(tmp_path)
    assert fill_eod_id(DataConfig(path=str(tmp_path), reset_positions=True)).eod_id == tokenizer.eod_id
    named = DataConfig(kind="synthetic", tokenizer=str(tmp_path / "tokenizer.json"), reset_positions=True)
    assert fill_eod_id(named).eod_id == tokenizer.eod_id


@pytest.mark.parametrize("said", [True, -1, "3"])
def test_a_receipt_that_says_no_number_says_nothing(tmp_path: Path, said: Any) -> None:
    with pytest.raises(UserError, match=r"set data\.eod_id="):
        fill_eod_id(DataConfig(path=str(corpus(tmp_path, eod_id=said)), reset_positions=True))


def problems(data: DataConfig) -> list[str]:
    config = Layout().config()
    model = replace(config.model, vocab_size=VOCAB_OF_DOCUMENTS)
    return corpus_problems(replace(config, data=replace(data, seq_length=SEQ), model=model))


def test_an_end_that_is_unknown_or_no_token_is_a_problem() -> None:
    switch = SWITCHES[2]
    asked: dict[str, Any] = {switch: True}
    assert problems(DataConfig(kind="synthetic", **asked)) == [
        f"data.{switch}=true needs the id of the end-of-document token, and no corpus.json or tokenizer.json "
        "of a corpus records it: set data.eod_id=… or data.tokenizer=…"
    ]
    assert problems(DataConfig(kind="synthetic", eod_id=0, **asked)) == []
    (problem,) = problems(DataConfig(kind="synthetic", eod_id=11, **asked))
    assert problem.startswith("data.eod_id=11 is not a token of model.vocab_size=11")


def test_documents_written_without_an_end_are_a_problem(tmp_path: Path) -> None:
    path = corpus(tmp_path, append_eod=False)
    assert problems(DataConfig(path=str(path), reset_attention=True)) == [
        f"data.reset_attention=true, and the documents in {path} were written without an end-of-document "
        "token: build them with append_eod=true, or set data.reset_attention=false"
    ]
    assert problems(DataConfig(path=str(path))) == []


def test_ends_that_contradict_each_other_are_a_problem(tmp_path: Path) -> None:
    one, other = corpus(tmp_path / "one"), corpus(tmp_path / "other", eod_id=5)
    (problem,) = problems(DataConfig(path=str(one), eod_id=4, reset_positions=True))
    assert f"the end-of-document token is 4 by data.eod_id, 3 by {one}/corpus.json" in problem
    with pytest.raises(UserError, match="build with one tokenizer"):
        fill_eod_id(DataConfig(blend=(str(one), str(other)), reset_positions=True))


def batches(layout: Layout, ctx: ParallelContext) -> list[Batch]:
    samples = SyntheticDataset(VOCAB_OF_DOCUMENTS, SEQ, SAMPLES, 3)
    return list(eval_batches(samples, micro_batch_size=2, rank=ctx.dp.rank, size=ctx.dp.size))


def scores(ctx: ParallelContext, layout: Layout, *, documents: bool = True) -> tuple[float, float]:
    """Training loss and validation loss of the same samples, without dropout."""
    config = layout.config()
    if not documents:
        config = replace(config, data=DataConfig(kind="synthetic", seq_length=SEQ))
    trainer = Trainer(config, ctx)
    validated = trainer.validate(batches(layout, ctx))[0]
    return trainer.mean_loss(trainer.train_step(batches(layout, ctx))), validated


def test_validation_keeps_documents_apart_as_training_does() -> None:
    """The same mean loss per scored token, to 1e-12, also over stages; another one without boundaries."""
    alone = Layout(documents=True, micro_batches=4)
    expected = scores(shape_context(), alone)[0]
    assert abs(expected - scores(shape_context(), alone, documents=False)[0]) > 1e-4
    for trained, validated in run_on_ranks(scores, replace(alone, pp=2, vp=2), pp=2):
        assert (trained, validated) == pytest.approx((expected, expected), rel=0, abs=1e-12)


def test_the_loss_is_the_mean_over_what_is_scored() -> None:
    """Tokens behind an end are in neither the sum nor the count."""
    layout = Layout(documents=True, micro_batches=4)
    trainer = Trainer(layout.config(), shape_context())
    micro_batches = batches(layout, trainer.ctx)
    ends = sum(int((batch.tokens == EOD).sum()) for batch in micro_batches)
    assert ends > 0
    assert trainer.global_counts(micro_batches).item() == SAMPLES * SEQ - ends


def test_a_run_remembers_its_boundaries_and_is_scored_with_them(tmp_path: Path) -> None:
    """`mlm eval loss` repeats the run's last validation loss, with the corpus's receipt gone."""
    folder, out = corpus(tmp_path / "corpus"), tmp_path / "run"
    words = ["model=gpt2_tiny", f"model.vocab_size={VOCAB_OF_DOCUMENTS}", "data.seq_length=16", "log.every=1"]
    words += ["train.steps=2", "train.global_batch_size=4", "train.micro_batch_size=2", "dist.device=cpu"]
    words += ["schedule=constant", "schedule.warmup_steps=1", f"data.path={folder}", f"out={out}"]
    assert main(["pretrain", *words, *(f"data.{switch}=true" for switch in SWITCHES)]) == 0
    checkpoint = latest_checkpoint(out / "checkpoints")
    config = read_manifest(checkpoint).state["config"]
    assert config["data"]["eod_id"] == 3
    (validation,) = [record["loss"] for record in records(out, "validation")]

    (folder / "corpus.json").unlink()
    assert main(["eval", "loss", f"ckpt={out}", f"out={tmp_path / 'score.json'}", "dist.device=cpu"]) == 0
    assert json.loads((tmp_path / "score.json").read_text())["loss"] == pytest.approx(validation, abs=1e-6)
