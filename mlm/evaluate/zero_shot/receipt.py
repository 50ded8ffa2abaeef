"""What an evaluation leaves behind: a table for people, and JSON that says how each number came about."""

import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mlm
from mlm.config.build import to_dict
from mlm.data.receipt import version_of
from mlm.data.tokenizer import Tokenizer
from mlm.evaluate.config import ZeroShotConfig
from mlm.evaluate.zero_shot.protocol import Outcome, Protocol
from mlm.files.results import named
from mlm.inference.trained import Trained
from mlm.terminal import add_row, console, plain, table


def receipt(
    task: str,
    config: ZeroShotConfig,
    trained: Trained,
    tokenizer: Tokenizer,
    found: Sequence[tuple[Protocol, Outcome]],
    *,
    seconds: float,
    learnt_from: list[dict[str, Any]],
) -> dict[str, Any]:
    """Everything that a score depends on, and the scores."""
    return {
        "task": task,
        "results": [result_of(protocol, outcome) for protocol, outcome in found],
        "checkpoint": str(trained.path),
        "checkpoint_digest": trained.manifest.digest,
        "trained_on": learnt_from,
        "step": trained.manifest.step,
        "tokenizer_digest": tokenizer.digest,
        "vocabulary_digest": tokenizer.vocabulary_digest,
        "precision": config.precision.dtype,
        "config": to_dict(config),
        "seconds": round(seconds, 3),
        "versions": {
            "mlm": mlm.__version__,
            "torch": torch.__version__,
            "tokenizers": version_of("tokenizers"),
            "python": platform.python_version(),
        },
    }


def result_of(protocol: Protocol, outcome: Outcome) -> dict[str, Any]:
    """One protocol's numbers, and what they are numbers of."""
    return {
        "task": protocol.task,
        "protocol": protocol.name,
        "metrics": {
            name: {"value": metric.value, "standard_error": metric.stderr}
            for name, metric in outcome.metrics.items()
        },
        **protocol.facts,
        **protocol.source.facts(),
        "warnings": list(protocol.warnings),
    }


def show(result: dict[str, Any], protocols: Sequence[Protocol], out: Path) -> None:
    """The table for people, and what was left out on stderr."""
    limit = result["config"]["limit"]
    made = table(
        f"eval {result['task']} · {plain(result['checkpoint'])} · step {result['step']}"
        + ("" if limit is None else f" · the first {limit} only (limit={limit})"),
        *("task", "protocol", "metric", "value#", "± s.e.#"),
    )
    for entry in result["results"]:
        for name, metric in entry["metrics"].items():
            error = metric["standard_error"]
            add_row(
                made,
                *(entry["task"], entry["protocol"], name, number(metric["value"])),
                "" if error is None else number(error),
            )
    screen = console()
    screen.print(made)
    for protocol in protocols:
        source = protocol.source
        screen.print(f"{protocol.task} by {protocol.name}: {protocol.counts}")
        screen.print(f"  {plain(source.name)}, {source.form}, {source.digest}")
    screen.print(f"checkpoint {result['checkpoint_digest']}, {result['precision']}")
    screen.print(f"written to {plain(named(out))}")
    for warning in dict.fromkeys(w for protocol in protocols for w in protocol.warnings):
        print(f"mlm eval {result['task']}: {plain(warning)}", file=sys.stderr)


def number(value: float) -> str:
    """Five significant digits, and thousands set apart."""
    return f"{value:,.5g}" if abs(value) < 1e6 else f"{value:.4e}"
