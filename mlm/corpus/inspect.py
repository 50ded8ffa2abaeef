"""`mlm data inspect`: the contents of a corpus."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.corpus.config import DataInspectConfig
from mlm.data.corpus_files import corpora_at, eod_of, tokenizer_beside
from mlm.data.indexed import VERSION, IndexedDataset
from mlm.data.receipt import read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError
from mlm.util.results import target_name, write_result
from mlm.util.terminal import add_row, console, format_bytes, one_line, table

CHECKED_ENDS = 10_000  # documents whose last token is read: each costs a page
SAMPLE_TOKENS = 64
SAMPLE_LETTERS = 200

Facts = dict[str, Any]
"""Counts, as the result file holds them."""


def run_inspect(config: DataInspectConfig) -> None:
    """Print tables, write out. Raises UserError, CorruptFileError for a damaged pair."""
    folder, prefixes = corpora_at(config.path)
    if config.document is not None or config.token is not None:
        run_document(config, folder, prefixes[0])
        return
    receipt = read_receipt(folder)
    tokenizer, note = tokenizer_for(config, folder)
    eod_id = eod_of(receipt, tokenizer)
    corpora = [facts_of(prefix, tokenizer, eod_id, config.samples) for prefix in prefixes]
    if config.out is not None:
        result = {"task": "data inspect", "path": config.path, "corpora": corpora, "receipt": receipt}
        write_result(config.out, result)
    show(config, corpora, note)


def run_document(config: DataInspectConfig, folder: Path, prefix: Path) -> None:
    """Show one document whole. Raises UserError."""
    corpus, (tokenizer, _) = IndexedDataset(prefix), tokenizer_for(config, folder)
    number = document_wanted(config, corpus)
    ids = [int(token) for token in corpus.document(number)]
    known = tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in ids)
    text = tokenizer.decode(ids) if tokenizer is not None and known else None
    if config.out is not None:
        facts = {"document": number, "tokens": len(ids), "ids": ids, "text": text}
        write_result(config.out, {"task": "data inspect", "path": str(prefix), **facts})
    out = console()
    out.print(f"{prefix} · document {number:,} · {len(ids):,} tokens")
    shown = text if text is not None else " ".join(map(str, ids))
    for line in shown.split("\n"):
        out.print(
            "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def document_wanted(config: DataInspectConfig, corpus: IndexedDataset) -> int:
    """Return the number of the document to show. Raises UserError if it is out of range."""
    key, number = ("document", config.document) if config.document is not None else ("token", config.token)
    assert number is not None
    count = corpus.num_documents if key == "document" else corpus.num_tokens
    if not 0 <= number < count:
        raise UserError(f"{key}={number}: {corpus.prefix} holds {count} {key}s; use 0 to {count - 1}")
    return number if key == "document" else corpus.document_of(number)


def tokenizer_for(config: DataInspectConfig, folder: Path) -> tuple[Tokenizer | None, str | None]:
    """Return the tokenizer for samples, and a note if there is none. Raises UserError for a named one."""
    if config.tokenizer is not None:
        return Tokenizer.load(config.tokenizer), None
    try:
        tokenizer = tokenizer_beside(folder)
    except UserError as error:
        return None, str(error)
    note = "no tokenizer.json beside the corpus: set tokenizer=… to read samples as text"
    return tokenizer, None if tokenizer else note


def facts_of(prefix: Path, tokenizer: Tokenizer | None, eod_id: int | None, samples: int) -> Facts:
    """Inspect one pair. Raises UserError, CorruptFileError."""
    corpus = IndexedDataset(prefix, allow_empty=True)
    share, looked_at = ends_with(corpus, eod_id)
    return {
        "prefix": str(prefix),
        "dtype": corpus.dtype.name,
        "version": VERSION,
        "sequences": corpus.num_sequences,
        "documents": corpus.num_documents,
        "tokens": corpus.num_tokens,
        "bytes": corpus.bin_path.stat().st_size,
        "tokens_per_document": spread(np.diff(corpus.document_starts)),
        "ends_with_eod": share,
        "looked_at": looked_at,
        "samples": [sample_of(corpus, number, tokenizer) for number in spaced(corpus.num_documents, samples)],
    }


def spread(counts: NDArray[np.int64]) -> Facts:
    """Return min, median (the lower of two in the middle), mean and max of counts [n]."""
    if not len(counts):
        return {"min": 0, "median": 0, "mean": 0.0, "max": 0}
    return {
        "min": int(counts.min()),
        "median": int(np.quantile(counts, 0.5, method="lower")),
        "mean": int(counts.sum()) / len(counts),
        "max": int(counts.max()),
    }


def ends_with(corpus: IndexedDataset, eod_id: int | None) -> tuple[float | None, int]:
    """Return the share of documents that end with `eod_id`, and the number that were checked."""
    if eod_id is None or corpus.num_documents == 0:
        return None, 0
    numbers = np.array(spaced(corpus.num_documents, CHECKED_ENDS))
    starts, ends = corpus.document_starts[numbers], corpus.document_starts[numbers + 1]
    count = int((corpus.tokens[ends[ends > starts] - 1] == eod_id).sum())
    return count / len(numbers), len(numbers)


def spaced(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` numbers below `count`, evenly spaced."""
    number = min(count, wanted)
    return [(2 * i + 1) * count // (2 * number) for i in range(number)]


def sample_of(corpus: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> Facts:
    """Return the beginning of a document: text, if a tokenizer knows the ids, and ids."""
    document = corpus.document(number)
    ids = [int(token) for token in document[:SAMPLE_TOKENS]]
    text = None
    if tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in ids):
        text = tokenizer.decode(ids)[:SAMPLE_LETTERS]
    return {"document": number, "tokens": len(document), "text": text, "ids": ids}


def share_of(facts: Facts) -> str:
    """Describe the share of documents that end with the end-of-document token."""
    share = facts["ends_with_eod"]
    return "unknown" if share is None else f"{share:.1%} of {facts['looked_at']:,}"


ROWS: dict[str, Callable[[Facts], str]] = {
    "tokens are": lambda facts: f"{facts['dtype']} (version {facts['version']})",
    "documents": lambda facts: f"{facts['documents']:,}",
    "sequences": lambda facts: f"{facts['sequences']:,}",
    "tokens": lambda facts: f"{facts['tokens']:,}",
    "shortest document": lambda facts: f"{facts['tokens_per_document']['min']:,}",
    "median document": lambda facts: f"{facts['tokens_per_document']['median']:,}",
    "mean document": lambda facts: f"{facts['tokens_per_document']['mean']:,.1f}",
    "longest document": lambda facts: f"{facts['tokens_per_document']['max']:,}",
    "size of .bin": lambda facts: format_bytes(facts["bytes"]),
    "end with eod": share_of,
}


def show(config: DataInspectConfig, corpora: list[Facts], note: str | None) -> None:
    """Print the tables."""
    out, names = console(), [Path(facts["prefix"]).name for facts in corpora]
    header = table(f"data inspect · {config.path}", "", *(f"{name}#" for name in names))
    for name, cell in ROWS.items():
        add_row(header, name, *map(cell, corpora))
    out.print(header)
    samples = table("samples", "", "document#", "tokens#", "begins")
    for name, facts in zip(names, corpora, strict=True):
        for sample in facts["samples"]:
            begins = sample["text"] if sample["text"] is not None else " ".join(map(str, sample["ids"][:16]))
            add_row(samples, name, f"{sample['document']:,}", f"{sample['tokens']:,}", begins)
    if samples.row_count:
        out.print(samples)
        if note is not None:
            out.print(f"note: {one_line(note)}")
    if config.out is not None:
        out.print(f"written to {target_name(config.out)}")
