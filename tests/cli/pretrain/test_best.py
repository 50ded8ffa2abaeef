"""train.keep_best and train.patience: the weights that validate best, and the end of a run without gain."""

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlm.checkpoint.native.format import read_manifest
from mlm.checkpoint.native.run_state import BEST_VALIDATION
from mlm.cli import main
from mlm.cli.pretrain.run import PretrainLoop
from tests.cli.pretrain.test_pretrain import score_of
from tests.data.corpora import write_corpus
from tests.training.records import records

TINY = """
    model=gpt2_tiny model.vocab_size=64 data.seq_length=16 train.steps=20 train.global_batch_size=4
    train.micro_batch_size=4 train.validate_every=1 train.validate_batches=8 schedule=constant
    optimizer.lr=1e-2 log.every=1 dist.device=cpu train.keep_best=true train.patience=2
    checkpoint.save_every=1
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pattern to train on, and noise to validate on: the loss on that rises soon."""
    root, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    write_corpus(root / "train", [range(64)] * 40)
    write_corpus(root / "validation", [[draw.randrange(64) for _ in range(64)] for _ in range(8)])
    return root


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("best") / "run"
    assert main(["pretrain", *TINY, f"data.path={corpus}", f"out={out}"]) == 0
    return out


def validated(run: Path) -> list[float]:
    return [record["loss"] for record in records(run, "validation")]


def best_step(run: Path) -> int:
    (manifest,) = (run / "best/checkpoints").glob("step-*/manifest.json")
    return read_manifest(manifest.parent).step


def test_a_run_ends_after_so_many_validations_without_a_lower_loss(run: Path) -> None:
    losses = validated(run)
    lowest = losses.index(min(losses))
    assert len(losses) == lowest + 3 < 20
    assert len(records(run, "step")) == len(losses)
    assert best_step(run) == lowest + 1


def test_the_best_weights_score_what_their_validation_did(run: Path, corpus: Path, tmp_path: Path) -> None:
    found = score_of(run, tmp_path, f"path={corpus / 'validation'}")
    assert found == pytest.approx(min(validated(run)), abs=1e-5)


def test_an_ended_run_says_why_and_a_higher_patience_continues_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = shutil.copytree(run, tmp_path / "run")
    steps = len(validated(run))
    assert main(["pretrain", f"resume={again}"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        f"train.patience=2 ended this run at step {steps}: its best validation is of step {steps - 2}" in told
    )
    assert len(records(again, "step")) == steps
    assert main(["pretrain", f"resume={again}", "train.patience=4"]) == 0
    assert len(records(again, "step")) == steps + 2
    assert best_step(again) == steps - 2


def test_best_weights_that_could_not_be_saved_are_tried_again_at_the_next_lower_loss() -> None:
    saved, train = iter([True, False, True]), SimpleNamespace(keep_best=True, patience=9)
    trainer = SimpleNamespace(extra_state={}, step=0, config=SimpleNamespace(train=train))
    loop: Any = SimpleNamespace(trainer=trainer, save_best=lambda: next(saved))
    for loss, best in ((3.0, 3.0), (1.0, 3.0), (2.0, 2.0)):
        PretrainLoop.keep_best(loop, loss)
        assert trainer.extra_state[BEST_VALIDATION]["loss"] == best


def test_a_rollback_says_that_later_weights_are_still_the_best(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back, newest = shutil.copytree(run, tmp_path / "run"), len(validated(run))
    for step, says in ((best_step(run), False), (newest, True)):
        (kept,) = (back / "best/checkpoints").glob("step-*")
        kept.rename(kept.with_name(f"step-{step:08d}"))
        shutil.copytree(run / "checkpoints", back / "checkpoints", dirs_exist_ok=True)
        assert main(["ckpt", "rollback", str(back), str(newest - 1)]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert (f"step-{step:08d} validated best and stays: ckpt={back} takes it" in told) == says


def test_a_stopped_and_resumed_run_keeps_and_ends_as_the_uninterrupted_one(
    run: Path, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["pretrain", *TINY, f"data.path={corpus}", f"out={out}"]
    steps = len(validated(run))
    assert main([*words, f"train.steps={steps - 1}"]) == 0
    assert main(words) == 0
    assert best_step(out) == best_step(run)
    assert validated(out) == validated(run)


@pytest.mark.parametrize("key", ["train.patience=3", "ema.validate=true"])
def test_a_run_without_validation_data_is_rejected_before_it_starts(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    words = [word for word in TINY if not word.startswith(("train.keep_best", "train.patience"))]
    data = [f"data.train={corpus / 'train'}", f"out={tmp_path / 'run'}", "ema.decay=0.9"]
    assert main(["pretrain", *words, *data, key]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = key.partition("=")[0]
    assert f"{name}: goes by the validation loss" in line
    assert line.endswith(f"set data.validation=PREFIX, or remove {name}")
    assert main(["pretrain", *words, *data, key, "train.validate_every=0"]) == 2
    assert "has no effect with train.validate_every=0" in capsys.readouterr().err


def test_a_branch_keeps_a_best_of_its_own(run: Path, tmp_path: Path) -> None:
    """Its folder has none yet, so that its first validation is the best."""
    step = run / f"checkpoints/step-{len(validated(run)):08d}"
    more = [f"train.steps={len(validated(run)) + 1}", "train.patience=0"]
    assert main(["pretrain", f"resume={step}", f"out={tmp_path / 'new'}", *more]) == 0
    assert best_step(tmp_path / "new") == len(validated(run)) + 1
    assert len(validated(tmp_path / "new")) == 1
