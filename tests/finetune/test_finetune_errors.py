"""Mistakes of `mlm finetune`: one line each, with setting, value and remedy, before any rank starts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mlm.corpus.train_tokenizer import train_bpe
from mlm.finetune import training
from mlm.finetune.config import FinetuneCheckpointConfig
from mlm.optim.config import OptimizerConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from tests.finetune.material import VOCABULARY, gpt2
from tests.finetune.runs import BERT, GPT2, finetune, finetuning, losses, task_of, write_model


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """In `out` a finished run, in `other` other weights."""
    write_model(folder / "other", seed=1)
    finetune(finetuning(folder))
    return folder


def test_another_setting_is_rejected(folder: Path) -> None:
    config = finetuning(folder, train={"epochs": 3}, task=replace(task_of("classification"), max_length=20))
    begun = f"out={config.out} was begun with"
    assert sorted(training.preflight(config)) == [
        f"task.max_length=20: {begun} 40: use task.max_length=40, or set another out=…",
        f"train.epochs=3: {begun} 2: use train.epochs=2, or set another out=…",
    ]


def test_other_weights_and_rows_and_folders_of_other_runs_are_rejected(folder: Path, tmp_path: Path) -> None:
    config = finetuning(folder, out=str(folder / "other"))
    assert training.preflight(config) == [
        f"out={config.out}: holds checkpoints of another type of run: set another out=…"
    ]
    rows = shutil.copytree(folder / "classification", tmp_path / "rows")
    (rows / "validation.jsonl").write_text((rows / "train.jsonl").read_text())
    config = finetuning(folder, ckpt=str(folder / "other"), data={"path": str(rows)})
    begun = f"out={config.out} was begun with other"
    assert training.preflight(config) == [
        f"ckpt={config.ckpt}: {begun} weights: name those, or set another out=…",
        f"data.path={rows}: {begun} rows of split validation: bring them back, or set another out=…",
    ]


def test_another_vocabulary_is_rejected(folder: Path, tmp_path: Path) -> None:
    """That of a model which was saved without a tokenizer."""
    write_model(tmp_path / "gpt2", GPT2)
    (tmp_path / "gpt2/tokenizer.json").unlink()
    (tmp_path / "one.json").write_bytes(gpt2().content)
    (tmp_path / "other.json").write_bytes(train_bpe([VOCABULARY * 2, "xyz"] * 9, 300).content)
    places = {"ckpt": str(tmp_path / "gpt2"), "out": str(tmp_path / "out")}
    files = [str(tmp_path / name) for name in ("one.json", "other.json")]
    one, other = (finetuning(folder, data={"tokenizer": file}, **places) for file in files)
    finetune(one)
    assert training.preflight(one) == []
    begun = f"data.tokenizer={files[1]}: out={one.out} was begun with another vocabulary"
    assert training.preflight(other) == [f"{begun}: name that tokenizer, or set another out=…"]


def test_what_no_score_depends_on_may_change(folder: Path, tmp_path: Path) -> None:
    rows = shutil.copytree(folder / "classification", tmp_path / "rows")
    config = finetuning(
        folder,
        ckpt=str(shutil.copytree(folder / "bert", tmp_path / "bert")),
        data={"path": str(rows)},
        train={"micro_batch_size": 1},
        parallel=ParallelConfig(tp=2, recompute="full"),
        checkpoint=FinetuneCheckpointConfig(save_every=1),
        task=replace(task_of("classification"), submission=("mine",), lr=1.0),
    )
    assert training.preflight(config) == []


def test_a_finished_run_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def files() -> dict[Path, int]:
        found = [path for path in (folder / "out").rglob("*") if path.name != ".lock"]
        return {path: path.stat().st_mtime_ns for path in found}

    before = files()
    finetune(finetuning(folder, parallel=ParallelConfig(recompute="full")))
    assert files() == before
    assert f"{folder / 'out'} is finished: set another out=… to train again" in capsys.readouterr().out


def test_predictions_can_be_asked_for_later(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "out", tmp_path / "out")
    config = finetuning(folder, out=str(tmp_path / "out"), data={"predict_tests": True})
    assert finetune(config)["predictions"] == [str(tmp_path / "out/predictions/test.tsv")]
    assert losses(tmp_path / "out") == losses(folder / "out")


def test_a_tokenizer_without_the_special_tokens_of_bert_is_rejected(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "bert", replace(BERT, vocab_size=384))
    gpt2().save(tmp_path / "bert")
    (problem,) = training.preflight(finetuning(folder, ckpt=str(tmp_path / "bert")))
    assert problem.startswith("the tokenizer has no [CLS] and [SEP]")


def test_padding_that_the_model_cannot_read_is_rejected(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "bert", replace(BERT, max_positions=47))
    task = replace(task_of("classification"), max_length=47)
    parallel = ParallelConfig(tp=2, sequence_parallel=True)
    config = finetuning(
        folder, ckpt=str(tmp_path / "bert"), out=str(tmp_path / "o"), task=task, parallel=parallel
    )
    assert training.preflight(config) == [
        "task.max_length=47: sequence_parallel=true pads texts to a multiple of tp=2, and the model "
        "reads 47 tokens: use task.max_length=46 or less"
    ]


def test_outputs_that_are_no_numbers_end_a_run(folder: Path, tmp_path: Path) -> None:
    config = finetuning(folder, out=str(tmp_path), optimizer=OptimizerConfig(lr=1e300))
    with pytest.raises(UserError, match="not finite in precision=fp64:") as error:
        training.run(config, ParallelContext())
    assert "\n" not in str(error.value)
