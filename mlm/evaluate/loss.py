"""`mlm eval loss`: mean loss, perplexity and bits per byte of a checkpoint over an indexed corpus.

Protocol of a GPT-2: the corpus's tokens in their order, split into windows of seq_length; each token but the
very first is scored once, with the tokens before it in its window as context. Perplexity is exp(mean loss per
token). Bits per byte is the summed loss in bits over the UTF-8 bytes of the text: comparable across
tokenizers.

That of a BERT: one pass over the corpus's samples, as in pretraining but masked in one way whatever the seed
of the run; loss per masked token and per order of two segments, and the accuracy of both.

The score does not depend on layout or batch size.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.format import RESTORE
from mlm.convert.source import Source, open_source
from mlm.data.blend_history import trained_on
from mlm.data.config import DataConfig
from mlm.data.files_present import missing_pair
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import RECEIPT, check_corpus, read_receipt
from mlm.data.sampler import Dataset, MicroBatch, eval_batches
from mlm.evaluate.config import EvalLossConfig
from mlm.inference.trained import (
    Trained,
    load_trained,
    open_predictor,
    window_length,
)
from mlm.launch.rules.layout import CONTEXT_FITS, Launch
from mlm.launch.rules.nearest import layout_problems
from mlm.models.bert.model import PARTS
from mlm.parallel.mesh import ParallelContext
from mlm.runs.checks import context_problem
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import validation_prefixes
from mlm.runs.tokenizer import receipt_tokenizer
from mlm.training.pipelined import evaluate
from mlm.training.state import read_history
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import digest_file
from mlm.util.results import folder_problem, result_problems, target_name, write_result
from mlm.util.terminal import add_row, console, progress_bar, table


def preflight(config: EvalLossConfig) -> list[str]:
    """Problems that reading the named files shows; called before any rank starts."""
    try:
        source = open_predictor(config.ckpt, config.parallel, causal=False)
        trained = source.config
        prefix = corpus_prefix(config, trained)
        seq_length = window_length(config.seq_length, trained)
        if check := trained.model.family.check_tokenizer:
            check(source.load_tokenizer(config.tokenizer, any_size=True))
    except UserError as error:
        return list(error.problems)
    if problem := corpus_problem(prefix, source):
        return [problem]
    if problems := context_problems(config, trained, seq_length):
        return problems
    out = result_path(config, source, prefix)
    problem = folder_problem(out)
    return [
        *([problem] if problem else result_problems(out)),
        *check_corpus(prefix, vocab_size=trained.model.vocab_size, seq_length=1, min_samples=1),
        *([] if seq_length > 0 else [f"seq_length={seq_length}: use at least 1"]),
    ]


def corpus_problem(prefix: Path, source: Source) -> str | None:
    """Return the error where a corpus was written with another tokenizer than a model was trained with."""
    known, written = source.tokenizer_digest, receipt_tokenizer(prefix.parent)
    if known is None or written is None or known.is_same(written):
        return None
    return (
        f"path={prefix}: was written with the tokenizer {written.digest}, {source.path} was trained with "
        f"{known.digest}; name a corpus that `mlm data build` wrote with the run's tokenizer.json"
    )


def context_problems(config: EvalLossConfig, trained: PretrainConfig, seq_length: int) -> list[str]:
    """Problems of splitting windows of a checkpoint's model over cp ranks."""
    cp = config.parallel.cp
    if problem := context_problem(cp, trained.model, trained.data):
        return [problem]
    values = {
        **{"cp": cp, "tp": config.parallel.tp, "sequence_parallel": False},  # which has no effect here
        **{"data.seq_length": seq_length, "model.max_positions": trained.model.max_positions},
    }
    names = {"data.seq_length": "seq_length"}
    return list(layout_problems(values, Launch(None, None), (CONTEXT_FITS,), names=names, fix_names=names))


def corpus_prefix(config: EvalLossConfig, trained: PretrainConfig) -> Path:
    """The corpus to score: the one named, or the validation set of the run that wrote the checkpoint."""
    if config.path is not None:
        return Path(config.path)
    prefixes = validation_prefixes(trained.data)
    if not prefixes:
        raise UserError(_no_validation_set(trained.data))
    if len(prefixes) > 1:
        choice = " or ".join(f"path={prefix}" for prefix in prefixes.values())
        raise UserError(f"path=null and the run mixed several corpora: give {choice}")
    return next(iter(prefixes.values()))


def _no_validation_set(data: DataConfig) -> str:
    give = "give path=… (prefix of a .bin/.idx)"
    if data.path is not None and not Path(data.path).exists() and missing_pair(data.path):
        return (
            f"path=null: the run's data.path={data.path} is not below {Path.cwd()}; start in the folder that "
            f"the run was started in, or {give}"
        )
    return f"path=null and the run had no validation set: {give}"


def result_path(config: EvalLossConfig, source: Source, prefix: Path) -> Path:
    """Path of the JSON receipt. The corpora of a blend have validation sets of one name."""
    name = f"{prefix.parent.name}-{prefix.name}" if source.config.data.blend else prefix.name
    return Path(config.out) if config.out else source.result_file(f"eval-loss-{name}.json")


def run(config: EvalLossConfig, ctx: ParallelContext) -> None:
    """Score the corpus; rank 0 prints a table and writes a JSON receipt."""
    trained = load_trained(open_source(config.ckpt), config.parallel, config.precision, ctx)
    prefix = corpus_prefix(config, trained.config)
    seq_length = window_length(config.seq_length, trained.config)
    indexed, learnt_from = IndexedDataset(prefix), training_corpora(trained)
    windows = scored_windows(config, trained, prefix, seq_length)
    batches = eval_batches(windows, micro_batch_size=config.batch_size, rank=ctx.dp.rank, size=ctx.dp.size)
    rounds = -(-len(windows) // (config.batch_size * ctx.dp.size))
    model, family = trained.model, trained.config.model.family
    objective = family.objective(trained.config.data, ctx, model.dtype)
    means, counts = evaluate(model, objective, progress(batches, rounds, ctx.is_main))
    if not ctx.is_main:
        return
    loss, is_bert = math.fsum(means[: objective.losses]), len(means) > 1
    receipt = prefix.with_name(RECEIPT)
    result: dict[str, Any] = {
        "task": "loss",
        "protocol": family.protocol,
        "loss": loss,
        **(dict(zip(objective.parts, means, strict=True)) if is_bert else {}),
        "perplexity": math.exp(min(means[0], 700.0)),
        "bits_per_byte": None
        if is_bert
        else bits_per_byte(loss * counts[0], config, prefix, indexed, trained.source),
        "tokens": counts[0],
        **({"samples": counts[1]} if is_bert else {}),
        "seq_length": seq_length,
        "corpus": str(prefix),
        "corpus_digest": digest_file(indexed.bin_path),
        "corpus_index_digest": indexed.digest,
        "corpus_receipt_digest": digest_file(receipt) if receipt.is_file() else None,
        "trained_on": learnt_from,
        "precision": config.precision.dtype,
        **trained.facts(),
    }
    out = result_path(config, trained.source, prefix)
    write_result(out, result)
    show(result, out)


def scored_windows(config: EvalLossConfig, trained: Trained, prefix: Path, seq_length: int) -> Dataset:
    """Return the scored samples of a corpus. Raises UserError if its family cannot make them."""
    family, data = trained.config.model.family, replace(trained.config.data, seq_length=seq_length)
    source = trained.source
    tokenizer = source.load_tokenizer(config.tokenizer, any_size=True) if family.check_tokenizer else None
    return family.samples.validation(data, prefix, tokenizer)


def training_corpora(trained: Trained) -> list[dict[str, Any]]:
    """Corpora the checkpoint was trained on; none if it is older or imported.

    Raises CorruptFileError.
    """
    if "data" not in trained.manifest.state:
        return []
    try:
        return trained_on(read_history(trained.manifest.state))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{trained.path}: what it was trained on cannot be read ({error!r}). {RESTORE}"
        ) from error


def bits_per_byte(
    nats: float, config: EvalLossConfig, prefix: Path, indexed: IndexedDataset, source: Source
) -> float | None:
    """Summed loss in bits over the text's UTF-8 bytes; None where the text cannot be known."""
    receipt = read_receipt(prefix.parent) or {}
    size = receipt.get("splits", {}).get(prefix.name, {}).get("bytes")
    if size is None:
        try:
            tokenizer = source.load_tokenizer(config.tokenizer, any_size=True)
        except UserError:
            return None
        size = sum(
            len(tokenizer.decode([t for t in indexed[i].tolist() if t != tokenizer.eod_id]).encode())
            for i in range(len(indexed))
        )
    return nats / math.log(2) / size if size else None


def progress(batches: Iterable[MicroBatch], rounds: int, shown: bool) -> Iterator[MicroBatch]:
    """Pass batches through under a progress bar with an ETA, on a terminal."""
    with progress_bar("scoring", rounds, shown=shown) as advance:
        for batch in batches:
            yield batch
            advance(1)


def show(result: dict[str, Any], out: Path) -> None:
    """Print the table."""
    bits = result["bits_per_byte"]
    if "samples" in result:
        columns = {
            "samples": f"{result['samples']:,}",
            "masked tokens": f"{result['tokens']:,}",
            **{name.replace("_", " "): f"{result[name]:.4f}" for name in PARTS},
            "perplexity": f"{result['perplexity']:.2f}",
        }
    else:
        columns = {
            "tokens": f"{result['tokens']:,}",
            "loss (nats/token)": f"{result['loss']:.4f}",
            "perplexity": f"{result['perplexity']:.2f}",
            "bits per byte": "unknown: no readable tokenizer" if bits is None else f"{bits:.4f}",
        }
    made = table(f"eval loss · {result['corpus']} · step {result['step']}", *(f"{name}#" for name in columns))
    add_row(made, *columns.values())
    screen = console()
    screen.print(made)
    screen.print(f"written to {target_name(out)}")
