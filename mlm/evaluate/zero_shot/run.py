"""`mlm eval wikitext103`, `mlm eval lambada` and `mlm eval all`: see README.md beside the package."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlm
from mlm.data.tokenizer import Tokenizer
from mlm.errors import ConfigError, CorruptFileError, UserError
from mlm.evaluate.config import (
    EvalAllConfig,
    EvalLambadaConfig,
    EvalWikitext103Config,
    ZeroShotConfig,
)
from mlm.evaluate.kept_scores import digest_requests
from mlm.evaluate.loss import training_corpora
from mlm.evaluate.scoring import Request, score
from mlm.evaluate.zero_shot import lambada, sources, wikitext103
from mlm.evaluate.zero_shot.protocol import Outcome, Protocol, distinct
from mlm.evaluate.zero_shot.receipt import receipt, show
from mlm.files.atomic import digest_bytes
from mlm.files.results import is_stream, result_problems, write_result
from mlm.inference.trained import (
    checkpoint_faults,
    continues_fault,
    load_tokenizer,
    load_trained,
    named_checkpoint,
    result_file,
    vocabulary_fault,
    window_length,
)
from mlm.models.config import ModelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.terminal import count_progress, plain

TASKS: dict[type[ZeroShotConfig], str] = {
    EvalWikitext103Config: "wikitext103",
    EvalLambadaConfig: "lambada",
    EvalAllConfig: "all",
}


def preflight(config: ZeroShotConfig) -> list[str]:
    """Faults that reading the named files shows; called before any rank starts."""
    faults = checkpoint_faults(config.ckpt, config.parallel)
    if faults:
        return faults
    try:
        named = named_checkpoint(config.ckpt)
        if fault := continues_fault(config.ckpt, named.config.model):
            return [fault]
        length = window_length(config.seq_length, named.config)
        protocols_of(config, checked_tokenizer(config, named.path, named.config.model), length)
    except CorruptFileError:
        raise  # damage has an exit code of its own
    except ConfigError as error:
        return list(error.problems)
    except UserError as error:
        return [str(error)]
    out = result_path(config, named.path)
    return [*folder_faults(config, out), *replaced_faults(config, out)]


def folder_faults(config: ZeroShotConfig, out: Path) -> list[str]:
    """What keeps a command from writing its result, or its samples."""
    if faults := result_problems(out):
        return faults
    files = {} if is_stream(out) else {f"out={config.out}": out}
    if config.samples is not None and not is_stream(config.samples):
        files[f"samples={config.samples}"] = Path(config.samples)
    faults = [
        f"{setting}: {path} is a folder; name a file in it"
        for setting, path in files.items()
        if path.is_dir()
    ]
    return faults or [
        f"{setting}: {path.parent} is no folder that can be written; name a file in one that is"
        for setting, path in files.items()
        if not (path.parent.is_dir() and os.access(path.parent, os.W_OK))
    ]


def checked_tokenizer(config: ZeroShotConfig, path: Path, model: ModelConfig) -> Tokenizer:
    """The tokenizer to score with, if it is the one the model was trained with. Raises UserError.

    With force=true another may be used, as long as the model has a row for each of its tokens.
    """
    tokenizer = load_tokenizer(config.tokenizer, path, force=True)
    if fault := vocabulary_fault(config.tokenizer, tokenizer, model):
        raise UserError(fault)
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
    """Read the texts and cut them into requests. Raises UserError, CorruptFileError."""
    match config:
        case EvalWikitext103Config(data=data):
            return wikitext(data.path, data.raw_path, config.overlapping_eval, config, tokenizer, length)
        case EvalLambadaConfig(data=data):
            return cloze(data.path, data.standard_path, config, tokenizer, length)
        case EvalAllConfig(data=data):
            stride = config.overlapping_eval
            return [
                *wikitext(data.wikitext103, data.wikitext103_raw, stride, config, tokenizer, length),
                *cloze(data.lambada, data.lambada_standard, config, tokenizer, length),
            ]
    raise AssertionError(config)


def wikitext(
    path: str | None,
    raw_path: str | None,
    stride: int,
    config: ZeroShotConfig,
    tokenizer: Tokenizer,
    length: int,
) -> list[Protocol]:
    """Both protocols of WikiText. A single file serves both."""
    words = sources.wikitext(path, raw=False)
    raw = words if path is not None and raw_path is None else sources.wikitext(raw_path, raw=True)
    limit = config.limit
    return [
        wikitext103.whole_text(words, tokenizer, seq_length=length, stride=stride, limit=limit),
        wikitext103.per_article(raw, tokenizer, seq_length=length, limit=limit),
    ]


def cloze(
    path: str | None, standard_path: str | None, config: ZeroShotConfig, tokenizer: Tokenizer, length: int
) -> list[Protocol]:
    """Both protocols of LAMBADA; lm-eval's again on the lower-case form, where that is given."""
    from_hub = path is None and standard_path is None
    found = list[Protocol]()
    if path is not None or from_hub:
        passages = sources.lambada(path, standard=False)
        for build in (lambada.strict_cloze, lambada.cloze):
            found.append(build(passages, tokenizer, seq_length=length, limit=config.limit))
    if standard_path is not None or from_hub:
        passages = sources.lambada(standard_path, standard=True)
        found.append(lambada.cloze(passages, tokenizer, seq_length=length, limit=config.limit))
    return found


def result_path(config: ZeroShotConfig, checkpoint: Path) -> Path:
    """The file of the JSON receipt. A trial with limit=N has one of its own beside the full result's."""
    return Path(config.out) if config.out else default_path(config, checkpoint)


def default_path(config: ZeroShotConfig, checkpoint: Path) -> Path:
    """Path without `out`, and of what is scored already if `out` is a stream."""
    trial = "" if config.limit is None else f"-limit{config.limit}"
    return result_file(checkpoint, f"eval-{TASKS[type(config)]}{trial}.json")


def replaced_faults(config: ZeroShotConfig, out: Path) -> list[str]:
    """The error where a trial would replace the result of a full evaluation."""
    found = read_result(out)
    if config.limit is None or found is None or found["config"].get("limit") is not None:
        return []
    return [
        f"out={out}: holds the result of a full evaluation, limit={config.limit} is a trial; "
        "name another file"
    ]


def read_result(out: Path) -> dict[str, Any] | None:
    """The receipt of an earlier evaluation; None where there is none."""
    if not out.is_file():  # a pipe would block
        return None
    try:
        found = json.loads(out.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(found, dict) and isinstance(found.get("config"), dict)
    return found if sound and "checkpoint_digest" in found else None


def set_aside(out: Path, identity: str) -> None:
    """Give the result of another evaluation a name with its digest, rather than replace it."""
    found = read_result(out)
    if found is not None and (other := identity_of_result(found)) != identity:
        os.replace(out, out.with_name(f"{out.stem}.{short(other)}{out.suffix}"))


def identity_of_result(result: dict[str, Any]) -> str:
    """The evaluation that a receipt is the result of: checkpoint, texts, protocols, settings of the score."""
    config = {key: result["config"].get(key) for key in ("limit", "seq_length", "overlapping_eval", "force")}
    about = [
        [each.get(key) for key in ("task", "protocol", "digest")]
        for each in result.get("results", [])
        if isinstance(each, dict)
    ]
    facts = [result["checkpoint_digest"], result.get("tokenizer_digest"), result.get("precision"), config]
    return digest_bytes(json.dumps([*facts, about], sort_keys=True).encode())


def short(digest: str) -> str:
    """Enough of a digest for a file name."""
    return digest.partition(":")[2][:8]


def kept_path(out: Path, identity: str, requests: Sequence[Request]) -> Path:
    """The file of scores so far: of this evaluation alone, so that a trial leaves another's as they are."""
    about = digest_bytes(f"{identity} {digest_requests(requests)}".encode())
    return out.with_name(f".{out.stem}.{short(about)}.partial.jsonl")


def run(config: ZeroShotConfig, ctx: ParallelContext) -> None:
    """Score the texts; rank 0 prints a table and writes a JSON receipt. What is scored already is kept beside
    it until then, so that a command that was stopped goes on."""
    trained = load_trained(config.ckpt, config.parallel, config.precision, ctx)
    tokenizer = checked_tokenizer(config, trained.path, trained.config.model)
    protocols = protocols_of(config, tokenizer, window_length(config.seq_length, trained.config))
    requests, where = distinct([request for protocol in protocols for request in protocol.requests])
    out = result_path(config, trained.path)
    beside = default_path(config, trained.path) if is_stream(out) else out
    identity = f"{trained.manifest.digest} {trained.model.dtype} mlm {mlm.__version__}"
    kept = kept_path(beside, identity, requests)
    begin = time.monotonic()
    with count_progress("scoring", len(requests), shown=ctx.is_main) as advance:
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
        TASKS[type(config)],
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
        set_aside(out, identity_of_result(result))
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
