"""`mlm data inspect`: the contents of a corpus."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from mlm.corpus.config import DataInspectConfig
from mlm.data.corpus_files import corpora_at, eod_of, origins_of, tokenizer_beside
from mlm.data.indexed import REBUILD, VERSION, IndexedDataset, bin_path, idx_path
from mlm.data.receipt import Receipt, read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.results import target_name, write_result
from mlm.util.terminal import add_row, console, format_bytes, one_line, table

BAR = 40  # characters of the longest bar
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
    show(config, corpora, receipt, note)


def run_document(config: DataInspectConfig, folder: Path, prefix: Path) -> None:
    """Show one document and its origin. Raises UserError."""
    corpus, (tokenizer, _) = IndexedDataset(prefix), tokenizer_for(config, folder)
    number = document_wanted(config, corpus)
    origin = origin_of(prefix, number)
    ids = [int(token) for token in corpus.document(number)]
    known = tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in ids)
    text = tokenizer.decode(ids) if tokenizer is not None and known else None
    if config.out is not None:
        facts = {"document": number, "tokens": len(ids), "origin": origin, "ids": ids, "text": text}
        write_result(config.out, {"task": "data inspect", "path": str(prefix), **facts})
    out = console()
    made = table(f"{prefix} · document {number:,}", "", "")
    for key, value in (
        {"tokens": f"{len(ids):,}"} | (origin or {"source": "not kept; build with keep_ids=true"})
    ).items():
        add_row(made, key, str(value))
    out.print(made)
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


def origin_of(prefix: Path, number: int) -> dict[str, Any] | None:
    """Return source, line and id of a document; None if they were not kept. Raises CorruptFileError."""
    kept = origins_of(prefix)
    if not idx_path(kept).is_file():
        return None
    content = IndexedDataset(kept).document(number).tobytes()
    try:
        origin = json.loads(content)
    except (ValueError, RecursionError):
        origin = None
    if not isinstance(origin, dict):
        raise CorruptFileError(f"{bin_path(kept)} does not record the source of document {number}: {REBUILD}")
    return {one_line(str(key)): one_line(str(value)) for key, value in origin.items()}


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
        "sequences_per_document": spread(np.diff(corpus.document_indices)),
        "ends_with_eod": share,
        "looked_at": looked_at,
        "samples": [sample_of(corpus, number, tokenizer) for number in spaced(corpus.num_documents, samples)],
    }


def spread(counts: NDArray[np.int64]) -> Facts:
    """Return min, median (the lower of two in the middle), mean, max and histogram of counts [n].

    The histogram holds (from, to, documents): 0, 1, 2 to 3, 4 to 7, …
    """
    if not len(counts):
        return {"min": 0, "median": 0, "mean": 0.0, "max": 0, "histogram": []}
    bits = np.bincount(np.frexp(counts.astype(np.float64))[1])  # documents by the bits of their count
    bins = [(1 << k >> 1, (1 << k) - 1, int(n)) for k, n in enumerate(bits)]
    return {
        "min": int(counts.min()),
        "median": int(np.quantile(counts, 0.5, method="lower")),
        "mean": int(counts.sum()) / len(counts),
        "max": int(counts.max()),
        "histogram": bins[int(np.flatnonzero(bits)[0]) :],
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


HEADER_ROWS: dict[str, Callable[[Facts], str]] = {
    "tokens are": lambda facts: f"{facts['dtype']} (version {facts['version']})",
    "documents": lambda facts: f"{facts['documents']:,}",
    "sequences": lambda facts: f"{facts['sequences']:,}",
    "tokens": lambda facts: f"{facts['tokens']:,}",
    "size of .bin": lambda facts: format_bytes(facts["bytes"]),
    "end with end-of-document": share_of,
}


def show(config: DataInspectConfig, corpora: list[Facts], receipt: Receipt | None, note: str | None) -> None:
    """Print the tables."""
    out, names = console(), [Path(facts["prefix"]).name for facts in corpora]
    header = table(f"data inspect · {config.path}", "", *(f"{name}#" for name in names))
    for name, cell in HEADER_ROWS.items():
        add_row(header, name, *map(cell, corpora))
    out.print(header)
    samples = table("samples", "", "document#", "tokens#", "begins")
    for name, facts in zip(names, corpora, strict=True):
        show_spread(out, f"{name}: tokens per document", facts["tokens_per_document"])
        if facts["sequences"] != facts["documents"]:
            show_spread(out, f"{name}: sequences per document", facts["sequences_per_document"])
        for sample in facts["samples"]:
            begins = sample["text"] if sample["text"] is not None else " ".join(map(str, sample["ids"][:16]))
            add_row(samples, name, f"{sample['document']:,}", f"{sample['tokens']:,}", begins)
    if receipt is not None:
        show_receipt(out, receipt)
    if samples.row_count:
        out.print(samples)
        if note is not None:
            out.print(f"note: {one_line(note)}")
    if config.out is not None:
        out.print(f"written to {target_name(config.out)}")


def show_spread(out: Console, title: str, spread: Facts) -> None:
    """Print a histogram as bars."""
    summary = f"min {spread['min']:,} · median {spread['median']:,} · mean {spread['mean']:,.1f}"
    bars = table(f"{title}: {summary} · max {spread['max']:,}", "from#", "to#", "documents#", "")
    longest = max((documents for *_, documents in spread["histogram"]), default=1)
    for low, high, documents in spread["histogram"]:
        add_row(bars, f"{low:,}", f"{high:,}", f"{documents:,}", "█" * -(-documents * BAR // longest))
    out.print(bars)


def show_receipt(out: Console, receipt: Receipt) -> None:
    """Print how the corpus was made, by its receipt, which may be of any shape."""
    made = table("receipt", "", "")
    recipe = receipt.get("recipe")
    sections = {f"recipe.{key}": value for key, value in recipe.items()} if isinstance(recipe, dict) else {}
    facts = {key: receipt.get(key) for key in ("format", "tokenizer", "vocab_size", "eod_id", "seed", "read")}
    for key, value in (facts | {"rejected": receipt.get("rejected")} | sections).items():
        if value not in (None, {}):
            add_row(made, key, format_entry(value))
    removed = receipt.get("removed")
    for rule, count in removed.items() if isinstance(removed, dict) else ():
        add_row(made, f"removed by {rule}", format_entry(count))
    out.print(made)


def format_entry(value: Any) -> str:
    """Format a table of the receipt in one line, without unset values."""
    if not isinstance(value, dict):
        return str(value)
    return " ".join(f"{key}={item}" for key, item in value.items() if item not in (None, [], {}))
