"""Run folders as a run writes them, made by hand."""

import json
from pathlib import Path
from typing import Any

import yaml

LAYOUT: dict[str, Any] = {"tp": 2, "cp": 1, "pp": 2, "dp": 2, "sequence_parallel": False, "zero": 0}
MODEL: dict[str, Any] = {
    **{"kind": "gpt2", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "max_positions": 32},
    "vocab_size": 200,
}


def settings(**changed: Any) -> dict[str, Any]:
    """Settings of a run as config.yaml has them; `changed` replaces top-level ones."""
    return {
        "command": "pretrain",
        "name": "a",
        "out": "runs/a",
        "model": MODEL,
        "data": {"kind": "synthetic", "seq_length": 32},
        "train": {"steps": 100, "global_batch_size": 16, "micro_batch_size": 2},
        "dist": {"device": "cpu"},
        **LAYOUT,
        **changed,
    }


def started(step: int = 0, **fields: Any) -> dict[str, Any]:
    known = {"total_steps": 100, "loss_unit": "nats per token", "command": ["mlm", "pretrain"]}
    return {"kind": "run", "time": 1000.0 + step, "start_step": step, "layout": LAYOUT, **known, **fields}


def stepped(step: int, **fields: Any) -> dict[str, Any]:
    numbers = {"loss": 5.0 - step / 100, "lr": 1e-3, "grad_norm": 1.0, "tokens": step * 512}
    rates = {"tokens_per_s": 1000.0, "step_time_s": 0.5, "memory_bytes": 2**30}
    return {"kind": "step", "time": 1000.0 + step, "step": step, **numbers, **rates, **fields}


def validated(step: int, loss: float = 4.5) -> dict[str, Any]:
    return {"kind": "validation", "time": 1000.0 + step, "step": step, "loss": loss, "perplexity": 90.0}


def write_run(folder: Path, *records: dict[str, Any], **changed: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(**changed), sort_keys=False))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def some_run(folder: Path, steps: int = 20, **changed: Any) -> Path:
    records = [started()]
    for step in range(1, steps + 1):
        records += [stepped(step), *([validated(step)] if step % 10 == 0 else [])]
    saved = {"kind": "saved", "time": 2000.0, "step": steps, "seconds": 0.1, "waited": 0.1}
    return write_run(folder, *records, {**saved, "path": "runs/a/checkpoints/step-1"}, **changed)
