"""Small runs of `mlm pretrain` on the samples of bad_data.py, their records, and a watched trainer."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlm.cli import main
from mlm.training.incidents.watcher import Incidents
from mlm.training.observer import Observers
from mlm.training.trainer import Trainer
from tests.training.records import records

RUN = [
    *("model=gpt2_tiny", "model.vocab_size=64", "model.num_layers=2", "data.seq_length=8"),
    *("data.kind=tests.training.incidents.bad_data:build", "train.steps=14", "train.global_batch_size=4"),
    *("train.micro_batch_size=2", "train.validate_every=0", "schedule.warmup_steps=1", "optimizer.lr=1e-2"),
    *("dist.device=cpu", "dist.threads_per_rank=1", "dist.peak_tflops=1", "log.every=1"),
    *("checkpoint.save_every=4", "checkpoint.keep_every=2", "checkpoint.asynchronous=false"),
    *("incident.window=8", "incident.threshold=1000"),
]
STEP = 11
"""The step that reads sample 41."""


def pretrain(out: Path, *words: str) -> int:
    return main(["pretrain", *RUN, f"out={out}", *words])


def losses(out: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(out, "step")}


def incident(out: Path, step: int = STEP) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder(out, step) / "incident.json").read_text())
    return found


def folder(out: Path, step: int = STEP) -> Path:
    return out / "incidents" / f"step-{step:08d}"


def watcher(trainer: Trainer, folder: Any) -> Incidents:
    """Incidents of a trainer whose reports go to `said`."""
    said: list[str] = []
    quiet = lambda *_: None  # noqa: E731
    reporter = SimpleNamespace(problem=said.append, note=said.append, event=quiet, rewound=quiet)
    made = Incidents(trainer, folder, reporter, SimpleNamespace(ancestry=trainer.ancestry))  # type: ignore[arg-type]
    trainer.observers = Observers([made])
    made.said = said  # type: ignore[attr-defined]
    return made
