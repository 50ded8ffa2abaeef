"""Shared by the reporting tests: made-up metrics, a clock, a reporter on a string."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from mlm.tracking.config import LogConfig
from mlm.tracking.metrics import StepMetrics
from mlm.tracking.reporter import Reporter


class Clock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step_metrics(step: int, **changed: Any) -> StepMetrics:
    numbers: dict[str, Any] = {
        "loss": 4.25,
        "lr": 3e-4,
        "grad_norm": 0.75,
        "loss_scale": None,
        "skipped_steps": 0,
        "tokens": step * 1000,
        "tokens_per_s": 2000.0,
        "step_time_s": 0.5,
        "tflops": 0.123,
        "mfu": 0.42,
        "memory_bytes": 3 * 2**29,
    }
    return StepMetrics(step=step, **{**numbers, **changed})


def terminal(*, is_terminal: bool = False, width: int = 100) -> Console:
    """A console that writes to a string: `console.file.getvalue()`."""
    return Console(
        file=io.StringIO(), force_terminal=is_terminal, width=width, color_system=None, _environ={}
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def reporter(out: Path, console: Console | None = None, **changed: Any) -> Reporter:
    """A reporter of a run of 100 steps in `out`."""
    settings: dict[str, Any] = {
        "total_steps": 100,
        "start_step": 0,
        "config": LogConfig(),
        "is_main": True,
        "header": [("run", "try"), ("layout", "tp=2 pp=1 dp=1")],
        "console": console or terminal(),
    }
    return Reporter(out, **{**settings, **changed})


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, each of which must be strict JSON."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]
