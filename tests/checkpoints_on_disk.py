"""Checkpoints as a training run writes them, made in one process, for the tests of `mlm ckpt`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.cli.commands import COMMANDS
from mlm.cli.outcome import report
from mlm.config.build import build, to_dict
from mlm.data.config import DataConfig
from mlm.models.config import ModelConfig
from mlm.parallel.config import ParallelConfig
from mlm.runs.config import PretrainConfig
from mlm.util.ownership import claim_folder
from mlm.util.system import resolve
from tests.checkpoint.native.helpers import save

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_heads=2, vocab_size=32, max_positions=16)
CONFIG = PretrainConfig(
    name="tiny",
    out="runs/tiny",
    model=MODEL,
    data=DataConfig(kind="synthetic", seq_length=16),
    parallel=ParallelConfig(tp=2),
)
BOOLEANS = ("true", "false")
SHARD = "rank-00000.safetensors"


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    named = ("model.w", "optimizer.exp_avg.w", "optimizer.exp_avg_sq.w")
    return {name: torch.full((6, 4), value) for name in named}


def training_state(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "consumed_samples": 8 * step,
        "applied_steps": float(step),
        "scaler": {"scale": 2.0, "clean_steps": 0, "skipped": 0},
        "config": to_dict(replace(CONFIG, **changes)),
        "versions": {"mlm": "0.1.0", "torch": "2.13.0"},
    }


def write_run(folder: Path, steps: Sequence[int] = (1, 2, 3), value: float = 1.0, **changes: Any) -> Path:
    claim_folder(folder, "run")
    for step in steps:
        state = training_state(step, **changes)
        save(folder / "checkpoints", step, tensors(value), state=state, keep_last=99)
    return folder


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def flip(file: Path, place: int) -> None:
    """Change a byte in place, counted from the end if negative: the file keeps its size and inode."""
    with open(file, "r+b") as f:
        at = f.seek(place, 0 if place >= 0 else 2)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))


def damage(path: Path) -> None:
    flip(path / SHARD, -1)


def shorten(path: Path) -> None:
    """Cut the first shard off."""
    (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-1])


def mlm(*words: object) -> int:
    """`mlm WORDS` from its settings to its exit code, on a wide terminal, without Hydra: it is slow.

    Paths come first, without their key; then key=value and --switch.
    """
    typed = [str(word) for word in words]
    command = next(c for c in COMMANDS if c.words == tuple(typed[:2]))
    values: dict[str, Any] = {}
    free = list(command.positional)
    for word in typed[2:]:
        key, mark, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and not mark:
            values[key.replace("-", "_")] = True
        elif mark:
            values[key] = json.loads(value) if value.lstrip("-").isdigit() or value in BOOLEANS else value
        else:
            values[free.pop(0)] = word

    def work() -> int:
        resolve(command.target)(build(command.spec, values, command.local_check))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        return report(command, work)


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result
