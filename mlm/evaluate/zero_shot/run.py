"""`mlm eval wikitext103`, `mlm eval lambada` and `mlm eval all`: see README.md beside the package."""

import json
import sys
import time
from pathlib import Path

import mlm
from mlm.data.tokenizer import Tokenizer
from mlm.evaluate.config import (
    EvalAllConfig,
    EvalLambadaConfig,
    EvalWikitext103Config,
    ZeroShotConfig,
)
from mlm.evaluate.loss import training_corpora
from mlm.evaluate.zero_shot import lambada, wikitext103
from mlm.evaluate.zero_shot.protocol import Outcome, Protocol, distinct
from mlm.evaluate.zero_shot.receipt import (
    default_path,
    identity_of_result,
    kept_path,
    receipt,
    replaced_problems,
    result_path,
    show,
)
from mlm.inference.scoring import score
from mlm.inference.trained import (
    checkpoint_problems,
    continuation_problem,
    load_tokenizer,
    load_trained,
    named_checkpoint,
    vocabulary_problem,
    window_length,
)
from mlm.models.config import ModelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from mlm.util.results import folder_problem, is_stream, result_problems, set_aside, write_result
from mlm.util.terminal import plain, progress_bar


def preflight(config: ZeroShotConfig) -> list[str]:
    """Problems that reading the named files shows; called before any rank starts."""
    problems = checkpoint_problems(config.ckpt, config.parallel)
    if problems:
        return problems
    try:
        named = named_checkpoint(config.ckpt)
        if problem := continuation_problem(config.ckpt, named.config.model):
            return [problem]
        length = window_length(config.seq_length, named.config)
        protocols_of(config, checked_tokenizer(config, named.path, named.config.model), length)
    except UserError as error:
        return list(error.problems)
    out = result_path(config, named.path)
    return [*folder_problems(config, out), *replaced_problems(config, out)]


def folder_problems(config: ZeroShotConfig, out: Path) -> list[str]:
    """Problems that prevent writing the result or the samples."""
    if problems := result_problems(out):
        return problems
    return [*filter(None, [folder_problem(out), folder_problem(config.samples, "samples")])]


def checked_tokenizer(config: ZeroShotConfig, path: Path, model: ModelConfig) -> Tokenizer:
    """The tokenizer to score with, if it is the one the model was trained with. Raises UserError.

    With force=true another may be used, as long as the model has a row for each of its tokens.
    """
    tokenizer = load_tokenizer(config.tokenizer, path, force=True)
    if problem := vocabulary_problem(config.tokenizer, tokenizer, model):
        raise UserError(problem)
    if config.tokenizer is None or config.force:
        return tokenizer
    saved = saved_tokenizer(path)
    if saved is not None and saved.vocabulary_digest != tokenizer.vocabulary_digest:
        raise UserError(
            f"tokenizer={config.tokenizer} has another vocabulary ({tokenizer.vocabulary_digest}) than that "
            f"saved with ckpt={config.ckpt} ({saved.vocabulary_digest}): leave tokenizer= out, or, if you "
            f"mean it, give force=true"
        )
    return tokenizer


def saved_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer saved with a run, None where there is none."""
    try:
        return load_tokenizer(None, path)
    except UserError:
        return None


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

    Scores are kept beside the receipt until it is written, so that a stopped command resumes.
    """
    trained = load_trained(config.ckpt, config.parallel, config.precision, ctx)
    tokenizer = checked_tokenizer(config, trained.path, trained.config.model)
    protocols = protocols_of(config, tokenizer, window_length(config.seq_length, trained.config))
    requests, where = distinct([request for protocol in protocols for request in protocol.requests])
    out = result_path(config, trained.path)
    beside = default_path(config, trained.path) if is_stream(out) else out
    identity = f"{trained.manifest.digest} {trained.model.dtype} mlm {mlm.__version__}"
    kept = kept_path(beside, identity, requests)
    begin = time.monotonic()
    with progress_bar("scoring", len(requests), shown=ctx.is_main) as advance:
        found = score(
            trained,
            requests,
            batch_size=config.batch_size,
            ctx=ctx,
            kept=kept,
            identity=identity,
            advance=advance,
            resumed=lambda count: tell_resumed(count, len(requests), kept) if ctx.is_main else None,
        )
    if not ctx.is_main:
        return
    places = iter(where)
    outcomes = [p.finish([found[next(places)] for _ in p.requests]) for p in protocols]
    result = receipt(
        config,
        trained,
        tokenizer,
        list(zip(protocols, outcomes, strict=True)),
        seconds=time.monotonic() - begin,
        learnt_from=training_corpora(trained),
    )
    if config.samples is not None:
        write_result(config.samples, samples(protocols, outcomes).encode(), key="samples")
    if config.out is None:
        set_aside(out, result, identity_of_result)
    write_result(out, result)
    kept.unlink(missing_ok=True)
    show(result, protocols, out)


def tell_resumed(count: int, total: int, kept: Path) -> None:
    """Say on stderr what an earlier command has scored."""
    print(
        f"mlm eval: {count:,} of {total:,} requests were scored before the last stop, in {plain(kept)}; "
        f"{total - count:,} are left",
        file=sys.stderr,
        flush=True,
    )


def samples(protocols: list[Protocol], outcomes: list[Outcome]) -> str:
    """A line of JSON per window, article and passage."""
    return "".join(
        json.dumps({"task": protocol.task, "protocol": protocol.name} | sample) + "\n"
        for protocol, outcome in zip(protocols, outcomes, strict=True)
        for sample in outcome.samples
    )
