"""The results of an evaluation: a table, and JSON that records how each number was computed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlm.config.build import to_dict
from mlm.data.tokenizer import Tokenizer
from mlm.evaluate.config import EvalAllConfig, EvalLambadaConfig, EvalWikitext103Config, ZeroShotConfig
from mlm.evaluate.zero_shot.protocol import Outcome, Protocol
from mlm.inference.scoring import Request, digest_requests
from mlm.inference.trained import Trained, result_file
from mlm.util.atomic import digest_bytes
from mlm.util.results import named, short_digest
from mlm.util.terminal import add_row, console, plain, table

TASKS: dict[type[ZeroShotConfig], str] = {
    EvalWikitext103Config: "wikitext103",
    EvalLambadaConfig: "lambada",
    EvalAllConfig: "all",
}


def receipt(
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
        "task": TASKS[type(config)],
        "results": [result_of(protocol, outcome) for protocol, outcome in found],
        **trained.facts("tokenizers"),
        "trained_on": learnt_from,
        "tokenizer_digest": tokenizer.digest,
        "vocabulary_digest": tokenizer.vocabulary_digest,
        "precision": config.precision.dtype,
        "config": to_dict(config),
        "seconds": round(seconds, 3),
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
    """Print the table, and on stderr what was left out."""
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


# ----- the files of results


def result_path(config: ZeroShotConfig, checkpoint: Path) -> Path:
    """The file of the JSON receipt. A trial with limit=N has a separate one beside the full result's."""
    return Path(config.out) if config.out else default_path(config, checkpoint)


def default_path(config: ZeroShotConfig, checkpoint: Path) -> Path:
    """Path without `out`, and of what is scored already if `out` is a stream."""
    trial = "" if config.limit is None else f"-limit{config.limit}"
    return result_file(checkpoint, f"eval-{TASKS[type(config)]}{trial}.json")


def kept_path(out: Path, identity: str, requests: Sequence[Request]) -> Path:
    """The file of scores so far: of this evaluation alone, so that a trial leaves another's as they are."""
    about = digest_bytes(f"{identity} {digest_requests(requests)}".encode())
    return out.with_name(f".{out.stem}.{short_digest(about)}.partial.jsonl")
