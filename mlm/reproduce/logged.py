"""Steps of a training run: those that its command asks for, and the last that it has logged."""

import os
from collections.abc import Sequence
from pathlib import Path

from mlm.tracking.history import parse, step_of

TAIL = 1 << 14  # bytes of a history in which its newest step is looked for


def steps_of(words: Sequence[str]) -> int:
    """Return the training steps that a command is to take; 0 if it does not say so."""
    if words[:2] != ("mlm", "pretrain"):
        return 0
    total = next((word.partition("=")[2] for word in words if word.startswith("train.steps=")), "")
    return int(total) if total.isdecimal() else 0


def last_step(metrics: Path) -> int:
    """Return the newest step in the last lines of a metrics.jsonl; 0 where there is none."""
    try:
        with open(metrics, "rb") as f:
            f.seek(max(f.seek(0, os.SEEK_END) - TAIL, 0))
            lines = f.read().split(b"\n")
    except OSError:
        return 0
    return max((step_of(record) for record in map(parse, lines) if record.get("kind") == "step"), default=0)
