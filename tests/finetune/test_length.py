"""Length of finetuning: from the number of rows where nothing else is typed, and what warns of too little."""

from math import ceil
from pathlib import Path
from typing import Any

import pytest

from mlm.cli import main
from mlm.finetune.config import FinetuneConfig, FinetuneTrainConfig
from mlm.finetune.inputs import fit_length
from tests.finetune.chats import write_chats, write_llama
from tests.finetune.material import shipped
from tests.finetune.runs import read

WARNING = "of training change little"
ROWS_OF_PAPERS = {"wnli": 635, "rte": 2490, "mrpc": 3668, "stsb": 5749, "cola": 8551}
"""Training rows of the smallest tasks of GLUE."""


def fitted(task: str, rows: int, **train: Any) -> FinetuneTrainConfig:
    settings = FinetuneTrainConfig(**train)
    config = FinetuneConfig(name="n", out="o", ckpt="c", task=shipped(task), train=settings)
    return fit_length(config, {config.task.train: range(rows)}).train  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "task, rows, epochs, batch",
    [
        *(("chat", 1, 50, 4), ("chat", 57, 4, 4), ("chat", 800, 2, 32), ("chat", 1600, 2, 64)),
        *(("preferences", 100, 2, 4), ("preferences", 1600, 1, 32)),
    ],
)
def test_few_rows_take_smaller_batches_and_then_more_epochs(
    task: str, rows: int, epochs: int, batch: int
) -> None:
    train = fitted(task, rows)
    assert (train.epochs, train.global_batch_size) == (epochs, batch)
    assert epochs * ceil(rows / batch) >= 50


def test_typed_lengths_are_kept() -> None:
    train = fitted("chat", 57, epochs=2, global_batch_size=64)
    assert (train.epochs, train.global_batch_size) == (2, 64)
    assert fitted("chat", 57, global_batch_size=64).epochs == 50
    assert fitted("chat", 57, epochs=1).global_batch_size == 4


@pytest.mark.parametrize("task", ROWS_OF_PAPERS)
def test_tasks_of_papers_keep_their_lengths(task: str) -> None:
    train, recipe = fitted(task, ROWS_OF_PAPERS[task]), shipped(task)
    assert (train.epochs, train.global_batch_size) == (recipe.epochs, recipe.batch_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("length")
    write_llama(folder / "llama")
    write_chats(folder / "chat", train=57, validation=3)
    return folder


def finetune(folder: Path, out: Path, *words: str) -> int:
    fixed = [f"data={folder / 'chat'}", f"ckpt={folder / 'llama'}", "dist.device=cpu"]
    return main(["finetune", "chat", f"out={out}", *fixed, *words])


def test_conversations_few_in_number_lower_the_loss(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With lora.rank alone: 60 steps at the rate of adapters; the folder then resumes with these settings."""
    assert finetune(folder, tmp_path / "out", "lora.rank=8", "optimizer.lr=1e-2") == 0
    out = capsys.readouterr()
    assert WARNING not in out.out + out.err
    assert read(tmp_path / "out/result.json")["steps"] == 60
    assert finetune(folder, tmp_path / "out", "lora.rank=8", "optimizer.lr=1e-2") == 0
    assert "is finished" in capsys.readouterr().out


def test_training_of_few_steps_is_warned_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train.epochs=2", "train.global_batch_size=64", "optimizer.lr=1e-2"]
    assert finetune(folder, tmp_path / "out", *words) == 0
    assert WARNING in " ".join("".join(capsys.readouterr()).split())
