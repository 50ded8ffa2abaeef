"""`mlm data inspect`: the contents of a corpus."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from mlm.corpus.config import DataInspectConfig
from mlm.data.corpus_files import corpora_at, eod_of, origins_of, size_of, tokenizer_beside
from mlm.data.indexed import CHUNK, REBUILD, VERSION, Index, IndexedDataset, bin_path, idx_path
from mlm.data.receipt import Receipt, read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.results import target_name, write_result
from mlm.util.terminal import add_row, console, format_bytes, one_line, progress_bar, table

BITS = 16
BINS = 1 << BITS
BAR = 40  # characters of the longest bar
CHECKED_ENDS = 10_000  # documents whose last token is read: each costs a page
SAMPLE_TOKENS = 64
SAMPLE_LETTERS = 200

Count = Callable[[Index, int, int], NDArray[np.int64]]


Facts = dict[str, Any]
"""Counts, as the result file holds them."""


def run_inspect(config: DataInspectConfig) -> None:
    """Print tables, write out. Raises UserError, CorruptFileError for a damaged pair."""
    if config.samples < 0:
        raise UserError(f"samples={config.samples} is below 0: use 0 to decode none")
    folder, prefixes = corpora_at(config.path)
    if config.document is not None or config.token is not None:
        run_document(config, folder, prefixes[0])
        return
    receipt = read_receipt(folder)
    tokenizer, note = tokenizer_for(config, folder)
    eod_id = eod_of(receipt, tokenizer)
    indices = [size_of(prefix.with_name(f"{prefix.name}.idx")) for prefix in prefixes]
    corpora = list[Facts]()
    with progress_bar("reading", sum(indices), in_bytes=True) as advance:
        for prefix, count in zip(prefixes, indices, strict=True):
            corpora.append(facts_of(prefix, tokenizer, eod_id, config.samples))
            advance(count)
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
    return number if key == "document" else corpus.index.document_of(number)


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
    """Inspect one pair in constant memory. Raises UserError, CorruptFileError."""
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
        "tokens_per_document": spread(corpus.index, tokens_of),
        "sequences_per_document": spread(corpus.index, sequences_of),
        "ends_with_eod": share,
        "looked_at": looked_at,
        "samples": [sample_of(corpus, number, tokenizer) for number in spaced(corpus.num_documents, samples)],
    }


def tokens_of(index: Index, begin: int, end: int) -> NDArray[np.int64]:
    """Return the tokens of documents `begin` to `end`: i64 [end - begin]."""
    return np.diff(index.document_starts(begin, end))


def sequences_of(index: Index, begin: int, end: int) -> NDArray[np.int64]:
    """Return the sequences of documents `begin` to `end`: i64 [end - begin]."""
    return np.diff(index.document_indices[begin : end + 1])


def spread(index: Index, count: Count) -> Facts:
    """Return min, median, mean, max and histogram of a count in constant memory; median exact below 2**32.

    The histogram holds (from, to, documents): 0, 1, 2 to 3, 4 to 7, … The median is the lower of the two in
    the middle; two passes find it: the first its upper 16 bits, the second the lower ones.
    """
    documents = index.num_documents
    if documents == 0:
        return {"min": 0, "median": 0, "mean": 0.0, "max": 0, "histogram": []}

    def chunks() -> Iterator[NDArray[np.int64]]:
        for begin in range(0, documents, CHUNK):
            yield count(index, begin, min(begin + CHUNK, documents))

    total, least, most = 0, int(np.iinfo(np.int64).max), 0
    upper, lower, logs = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64), np.zeros(65, np.int64)
    for chunk in chunks():
        total += int(chunk.sum())
        least, most = min(least, int(chunk.min())), max(most, int(chunk.max()))
        upper += np.bincount(np.minimum(chunk >> BITS, BINS - 1), minlength=BINS)
        logs += np.bincount(np.frexp(chunk.astype(np.float64))[1], minlength=65)  # bits of the number
    middle = (documents - 1) // 2
    high = int(np.searchsorted(np.cumsum(upper), middle, side="right"))
    for chunk in chunks():
        lower += np.bincount(chunk[chunk >> BITS == high] & (BINS - 1), minlength=BINS)
    low = int(np.searchsorted(np.cumsum(lower), middle - int(upper[:high].sum()), side="right"))
    present = np.flatnonzero(logs)
    bins = [(1 << k >> 1, (1 << k) - 1, int(logs[k])) for k in range(present[0], present[-1] + 1)]
    median = (high << BITS) + low
    return {"min": least, "median": median, "mean": total / documents, "max": most, "histogram": bins}


def ends_with(corpus: IndexedDataset, eod_id: int | None) -> tuple[float | None, int]:
    """Return the share of documents that end with `eod_id`, and the number that were checked."""
    if eod_id is None or corpus.num_documents == 0:
        return None, 0
    numbers = spaced(corpus.num_documents, CHECKED_ENDS)
    itemsize, count = corpus.dtype.itemsize, 0
    with open(corpus.bin_path, "rb", buffering=0) as f:  # the map would keep the pages around each token
        for number in numbers:
            start, end = map(int, corpus.index.document_starts(number, number + 1))
            if end > start:
                content = os.pread(f.fileno(), itemsize, (end - 1) * itemsize)
                count += int.from_bytes(content, "little", signed=corpus.dtype.kind == "i") == eod_id
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
