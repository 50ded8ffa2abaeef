"""`mlm eval wikitext103`, `mlm eval lambada` and `mlm eval all`."""

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import mlm
from mlm.cli.evaluate.settings import EvalAllConfig, EvalLambadaConfig, EvalWikitext103Config, ZeroShotConfig
from mlm.config.build import to_dict
from mlm.convert.source import Source, open_source
from mlm.data.tokenizer import Tokenizer
from mlm.evaluate.loss import training_corpora
from mlm.evaluate.zero_shot import lambada, wikitext103
from mlm.evaluate.zero_shot.protocol import Metric, Protocol
from mlm.inference.scoring import digest_requests, score
from mlm.inference.trained import (
    load_trained,
    open_predictor,
    result_identity,
    window_length,
)
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from mlm.util.files import digest_bytes
from mlm.util.results import (
    folder_problem,
    is_stream,
    rename_earlier_result,
    result_problems,
    short_digest,
    target_name,
    write_result,
)
from mlm.util.terminal import add_row, console, one_line, progress_bar, table

TASKS = {EvalWikitext103Config: "wikitext103", EvalLambadaConfig: "lambada", EvalAllConfig: "all"}


def preflight(config: ZeroShotConfig) -> list[str]:
    try:
        source = open_predictor(config.ckpt, config.parallel)
        length = window_length(config.seq_length, source.config)
        protocols_of(config, source.load_tokenizer(config.tokenizer, force=config.force), length)
    except UserError as error:
        return list(error.problems)
    out = config.out or default_path(config, source)
    return result_problems(out) or [*filter(None, [folder_problem(out)])]


def protocols_of(config: ZeroShotConfig, tokenizer: Tokenizer, length: int) -> list[Protocol]:
    """Read the texts and split them into requests. Raises UserError, CorruptFileError."""
    limit = config.limit
    match config:
        case EvalWikitext103Config(data=data):
            return wikitext103.protocols(
                data.path, data.raw_path, tokenizer, length, config.overlapping_eval, limit
            )
        case EvalLambadaConfig(data=data):
            return lambada.protocols(data.path, data.standard_path, tokenizer, length, limit)
        case EvalAllConfig(data=data):
            stride = config.overlapping_eval
            return [
                *wikitext103.protocols(
                    data.wikitext103, data.wikitext103_raw, tokenizer, length, stride, limit
                ),
                *lambada.protocols(data.lambada, data.lambada_standard, tokenizer, length, limit),
            ]
    raise AssertionError(config)


def run(config: ZeroShotConfig, ctx: ParallelContext) -> None:
    """Score the texts; rank 0 prints a table and writes a JSON receipt.

    Scores are kept next to the receipt until it is written, so that a stopped command resumes.
    """
    trained = load_trained(open_source(config.ckpt), config.parallel, config.precision, ctx)
    tokenizer = trained.source.load_tokenizer(config.tokenizer, force=config.force)
    protocols = protocols_of(config, tokenizer, window_length(config.seq_length, trained.config))
    requests = [request for protocol in protocols for request in protocol.requests]
    out = Path(config.out or default_path(config, trained.source))
    receipt = default_path(config, trained.source) if is_stream(out) else out
    identity = f"{trained.manifest.digest} {trained.model.dtype} mlm {mlm.__version__}"
    # Scores of this evaluation alone, so that a trial leaves another's as they are.
    digest = short_digest(digest_bytes(f"{identity} {digest_requests(requests)}".encode()))
    partial_scores, start = receipt.with_name(f".{receipt.stem}.{digest}.partial.jsonl"), time.monotonic()

    def report_resumed(count: int) -> None:
        if ctx.is_main:
            done = f"{count:,} of {len(requests):,} requests were scored before the last stop"
            line = f"mlm eval: {done}, in {one_line(partial_scores)}; {len(requests) - count:,} are left"
            print(line, file=sys.stderr, flush=True)

    with progress_bar("scoring", len(requests), shown=ctx.is_main) as advance:
        scores = score(
            trained,
            requests,
            batch_size=config.batch_size,
            ctx=ctx,
            saved=partial_scores,
            identity=identity,
            advance=advance,
            on_resume=report_resumed,
        )
    if not ctx.is_main:
        return
    remaining = iter(scores)
    metrics = [p.finish(list(islice(remaining, len(p.requests)))) for p in protocols]
    result = {
        "task": TASKS[type(config)],
        "results": list(map(result_of, protocols, metrics)),
        **trained.facts("tokenizers"),
        "trained_on": training_corpora(trained),
        "tokenizer_digest": tokenizer.digest,
        "vocabulary_digest": tokenizer.vocabulary_digest,
        "precision": config.precision.dtype,
        "config": to_dict(config),
        "seconds": round(time.monotonic() - start, 3),
    }
    if config.out is None:
        rename_earlier_result(out, result, result_identity)
    write_result(out, result)
    partial_scores.unlink(missing_ok=True)
    print_result(result, protocols, out)


def result_of(protocol: Protocol, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    return {
        "task": protocol.task,
        "protocol": protocol.name,
        "metrics": {
            name: {"value": metric.value, "standard_error": metric.stderr} for name, metric in metrics.items()
        },
        **protocol.facts,
        **protocol.source.facts(),
        "warnings": list(protocol.warnings),
    }


def print_result(result: dict[str, Any], protocols: Sequence[Protocol], out: Path) -> None:
    limit = result["config"]["limit"]
    title = f"eval {result['task']} · {one_line(result['checkpoint'])} · step {result['step']}"
    title += "" if limit is None else f" · the first {limit} only (limit={limit})"
    rows = table(title, "task", "protocol", "metric", "value#", "± s.e.#")
    for entry in result["results"]:
        for name, metric in entry["metrics"].items():
            error = "" if metric["standard_error"] is None else number(metric["standard_error"])
            add_row(rows, entry["task"], entry["protocol"], name, number(metric["value"]), error)
    screen = console()
    screen.print(rows)
    for protocol in protocols:
        source = protocol.source
        numbers = (f"{key} = {fact:,}" for key, fact in protocol.facts.items() if isinstance(fact, int))
        screen.print(f"{protocol.task} by {protocol.name}: {', '.join(numbers)}")
        screen.print(f"  {one_line(source.name)}, {source.form}, {source.digest}")
    screen.print(f"checkpoint {result['checkpoint_digest']}, {result['precision']}")
    screen.print(f"written to {one_line(target_name(out))}")
    for warning in dict.fromkeys(w for protocol in protocols for w in protocol.warnings):
        print(f"mlm eval {result['task']}: {one_line(warning)}", file=sys.stderr)


def number(value: float) -> str:
    return f"{value:,.5g}" if abs(value) < 1e6 else f"{value:.4e}"


def default_path(config: ZeroShotConfig, source: Source) -> Path:
    """Path of the JSON receipt without `out`. A trial with limit=N has a separate one."""
    trial = "" if config.limit is None else f"-limit{config.limit}"
    return source.result_file(f"eval-{TASKS[type(config)]}{trial}.json")
