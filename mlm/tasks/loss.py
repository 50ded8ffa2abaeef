"""`mlm eval loss`: mean loss, perplexity and bits per byte of a checkpoint over an indexed corpus.

Protocol: the corpus's tokens in their order, cut into windows of seq_length; each token but the very first is
scored once, with the tokens before it in its window as context. Perplexity is exp(mean loss per token). Bits
per byte is the summed loss in bits over the UTF-8 bytes of the text: comparable between tokenizers.
The score does not depend on layout or batch size.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import mlm
from mlm.checkpoint.save_load import read_manifest, resolve
from mlm.config.errors import UserError
from mlm.config.schema import PretrainConfig
from mlm.config.task_schema import EvalLossConfig
from mlm.data.gpt import EvalWindows
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import check_corpus, read_receipt
from mlm.data.sampler import Batch, eval_batches
from mlm.files import digest_file, write_atomic
from mlm.parallel.mesh import ParallelContext
from mlm.tasks.trained import checkpoint_faults, load_tokenizer, load_trained, run_directory, trained_config
from mlm.train.corpora import validation_prefix
from mlm.train.pipelined import evaluate


def preflight(config: EvalLossConfig) -> list[str]:
    """Faults that reading the named files shows; called before any rank starts."""
    faults = checkpoint_faults(config.ckpt, config.parallel)
    if faults:
        return faults
    path = resolve(config.ckpt)
    trained = trained_config(read_manifest(path), path)
    try:
        prefix = corpus_prefix(config, trained)
        seq_length = window_length(config, trained)
    except UserError as error:
        return [str(error)]
    folder = result_path(config, path, prefix).parent
    return [
        *(
            []
            if os.access(folder, os.W_OK)
            else [f"out={config.out}: {folder} is no folder that can be written"]
        ),
        *check_corpus(prefix, vocab_size=trained.model.vocab_size, seq_length=1, min_samples=1),
        *([] if seq_length > 0 else [f"seq_length={seq_length}: use at least 1"]),
    ]


def corpus_prefix(config: EvalLossConfig, trained: PretrainConfig) -> Path:
    """The corpus to score."""
    if config.path is not None:
        return Path(config.path)
    prefix = validation_prefix(trained.data)
    if prefix is None:
        raise UserError("path=null and the run had no validation set: give path=… (prefix of a .bin/.idx)")
    return prefix


def result_path(config: EvalLossConfig, checkpoint: Path, prefix: Path) -> Path:
    """Where the JSON receipt goes."""
    return Path(config.out) if config.out else run_directory(checkpoint) / f"eval-loss-{prefix.name}.json"


def window_length(config: EvalLossConfig, trained: PretrainConfig) -> int:
    """Tokens per window."""
    length = config.seq_length if config.seq_length is not None else trained.data.seq_length
    if length > trained.model.max_positions:
        raise UserError(
            f"seq_length={length} is longer than the model reads: use model.max_positions="
            f"{trained.model.max_positions} or less"
        )
    return length


def run(config: EvalLossConfig, ctx: ParallelContext) -> None:
    """Score the corpus; rank 0 prints a table and writes a JSON receipt."""
    trained = load_trained(config.ckpt, config.parallel, config.precision, ctx)
    prefix, seq_length = corpus_prefix(config, trained.config), window_length(config, trained.config)
    indexed = IndexedDataset(prefix)
    windows = EvalWindows(indexed, seq_length=seq_length)
    batches = eval_batches(windows, micro_batch_size=config.batch_size, rank=ctx.dp.rank, size=ctx.dp.size)
    rounds = -(-len(windows) // (config.batch_size * ctx.dp.size))
    loss, tokens = evaluate(trained.model, progress(batches, rounds, ctx.is_main))
    if not ctx.is_main:
        return
    result: dict[str, Any] = {
        "task": "loss",
        "protocol": "consecutive windows, every token but the first scored once",
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": bits_per_byte(loss * tokens, config, prefix, indexed, trained.path),
        "tokens": tokens,
        "seq_length": seq_length,
        "corpus": str(prefix),
        "corpus_digest": digest_file(Path(f"{prefix}.bin")),
        "checkpoint": str(trained.path),
        "checkpoint_digest": trained.manifest.digest,
        "step": trained.manifest.step,
        "precision": config.precision.dtype,
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
    }
    out = result_path(config, trained.path, prefix)
    write_atomic(out, (json.dumps(result, indent=2) + "\n").encode())
    show(result, out)


def bits_per_byte(
    nats: float, config: EvalLossConfig, prefix: Path, indexed: IndexedDataset, checkpoint: Path
) -> float | None:
    """Summed loss in bits over the text's UTF-8 bytes; None where the text cannot be known."""
    receipt = read_receipt(prefix.parent) or {}
    size = receipt.get("splits", {}).get(prefix.name, {}).get("bytes")
    if size is None:
        try:
            tokenizer = load_tokenizer(config.tokenizer, checkpoint)
        except UserError:
            return None
        size = sum(
            len(tokenizer.decode([t for t in indexed[i].tolist() if t != tokenizer.eod_id]).encode())
            for i in range(len(indexed))
        )
    return nats / math.log(2) / size if size else None


def progress(batches: Iterable[Batch], rounds: int, shown: bool) -> Iterator[Batch]:
    """Pass batches through under a progress bar with an ETA, on a terminal."""
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        yield from bar.track(batches, total=rounds)


def show(result: dict[str, Any], out: Path) -> None:
    """The table for people."""
    table = Table(title=f"eval loss · {result['corpus']} · step {result['step']}", title_justify="left")
    for name in ("tokens", "loss (nats/token)", "perplexity", "bits per byte"):
        table.add_column(name, justify="right")
    bits = result["bits_per_byte"]
    table.add_row(
        f"{result['tokens']:,}",
        f"{result['loss']:.4f}",
        f"{result['perplexity']:.2f}",
        "unknown: no tokenizer" if bits is None else f"{bits:.4f}",
    )
    console = Console()
    console.print(table)
    console.print(f"written to {out}", highlight=False)
