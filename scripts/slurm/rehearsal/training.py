"""The tiny run that every case trains, and its history compared with one process that nothing disturbed."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rehearsal.cluster import ROOT, Failed, wait

STEPS, SAVE_EVERY = 400, 5
TIMEOUT_S = 20
"""dist.timeout_s: a rank that waits so long for another reports it."""
CLOSE = 1e-9
"""Relative difference of losses in float64 between layouts. Other samples change them by a hundredth."""
RUN = (
    "model=gpt2_tiny model.vocab_size=64 model.num_layers=1 model.hidden_size=32 data=synthetic "
    "data.seq_length=8 train.global_batch_size=4 train.micro_batch_size=1 train.validate_every=0 "
    "schedule=constant precision=fp64 dist.device=cpu dist.peak_tflops=1 dist.threads_per_rank=1 log.every=1 "
    f"dist.timeout_s={TIMEOUT_S} checkpoint.save_every={SAVE_EVERY}"
).split()
"""Settings of every run. Its losses do not depend on train.steps."""


@dataclass(frozen=True)
class History:
    """The records of a run's metrics.jsonl."""

    records: list[dict[str, Any]]

    @staticmethod
    def of(out: Path) -> "History":
        path = out / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return History([json.loads(line) for line in lines if line.endswith("\n")])

    @property
    def losses(self) -> dict[int, float]:
        return {record["step"]: record["loss"] for record in self.records if record["kind"] == "step"}

    @property
    def starts(self) -> list[int]:
        return [record["start_step"] for record in self.records if record["kind"] == "run"]

    @property
    def sizes(self) -> list[int]:
        return [record["layout"]["dp"] for record in self.records if record["kind"] == "run"]

    @property
    def last(self) -> int:
        return max(self.losses, default=0)


def train_alone(python: str, out: Path) -> dict[int, float]:
    options = (f"train.steps={STEPS}", "checkpoint.save_every=0", f"out={out}")
    words = [python, "-m", "mlm", "pretrain", *RUN, *options]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"the run to compare with: {done.stderr.strip()}")
    return History.of(out).losses


def wait_for_step(out: Path, step: int, seconds: float = 240) -> int:
    """Wait until a run has logged a step; its last one."""
    wait(f"step {step} of {out.name}", lambda: History.of(out).last >= step, seconds)
    return History.of(out).last


def compare(out: Path, alone: Mapping[int, float], *, steps: int) -> History:
    """The history of a run whose steps are there once, with the undisturbed losses. Raises Failed."""
    found = History.of(out)
    numbers = [record["step"] for record in found.records if record["kind"] == "step"]
    if numbers != list(range(1, steps + 1)):
        raise Failed(f"the history holds the steps {numbers}, not 1 to {steps} once each")
    far = [step for step, loss in found.losses.items() if abs(loss / alone[step] - 1) > CLOSE]
    if far:
        step = far[0]
        raise Failed(f"step {step} has the loss {found.losses[step]!r}, undisturbed {alone[step]!r}")
    return found


def checkpoints(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*"))
