"""A step reads nothing back from the device: on tensors without content a read raises."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlm.cli.compose.composition import load_config
from mlm.data.sampler import Loader
from mlm.parallel.collectives import ToHost
from mlm.parallel.mesh import ParallelContext
from mlm.runs.corpora import train_dataset
from mlm.training import trainer as trainers
from mlm.training.incidents import watcher
from mlm.training.observer import Observers
from mlm.training.trainer import Trainer
from tests.slow import slow_but

META = torch.device("meta")
DROPOUT = "model.hidden_dropout=0.1 model.attention_dropout=0.1"


@pytest.fixture
def without_content(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The meta device, taken for a GPU; the numbers that the watcher reads behind the update."""
    reads: list[str] = []

    def read(self: ToHost) -> list[float]:
        assert self.x.device == META
        reads.append("read")
        return [1.0, 1.0, 0.0]

    monkeypatch.setattr(trainers, "init_parameters", lambda *_: None)
    monkeypatch.setattr(watcher, "DEFERRING", ("meta",))
    monkeypatch.setattr(ToHost, "read", read)
    return reads


@pytest.mark.parametrize(
    "words",
    slow_but(
        {0, 3},
        [
            "model=gpt2_tiny precision=fp16 pipeline=zb_h1",
            "model=gpt2_tiny precision=bf16 recompute=selective fuse_accumulation=true "
            "data.reset_attention=true data.reset_positions=true data.eod_id=3",
            f"model=bert_tiny precision=bf16 {DROPOUT}",
            "model=llama_tiny precision=fp8",
        ],
    ),
)
def test_a_watched_step_reads_only_the_numbers_it_is_judged_by(
    words: str, without_content: list[str], tmp_path: Path
) -> None:
    """Forward, backward, norm, clipping, optimizer, loss scale and the judgement of two steps."""
    sizes = ["train.global_batch_size=4", "train.micro_batch_size=2"]
    config = load_config("pretrain", [*words.split(), *sizes, "data=synthetic", "data.seq_length=32"])
    trainer: Trainer[Any] = Trainer(config, ParallelContext(device=META))
    reporter = SimpleNamespace()  # nothing is worth a report
    observer = watcher.Incidents(trainer, tmp_path, reporter, SimpleNamespace())  # type: ignore[arg-type]
    trainer.observers = Observers([observer])
    samples = train_dataset(config, 8)
    with Loader(
        samples, consumed_samples=0, global_batch_size=4, micro_batch_size=2, rank=0, size=1
    ) as loader:
        for batches in loader:
            observer.on_step_start(batches)
            observer.after_step(trainer.train_step(batches))
    assert without_content == ["read", "read"]


def test_a_read_is_noticed() -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.ones((), device=META).item()
