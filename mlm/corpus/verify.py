"""Integrity check of a corpus.

Every byte is read once: tokens are checked while they are digested, in constant memory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mlm.data.corpus_files import TOKENIZER, corpora_at, eod_of, tokenizer_beside
from mlm.data.indexed import REBUILD, IndexedDataset, bin_path, idx_path
from mlm.data.receipt import RECEIPT, Receipt, read_receipt
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import digest_file, digest_name
from mlm.util.terminal import Advance, one_line, progress_bar

BLOCK = 1 << 22  # bytes read at a time: 4 MiB, whole tokens


@dataclass(frozen=True)
class FileCheck:
    """One check of a file. An error fails the command, a note does not."""

    file: str
    name: str
    state: str
    """ok, error or note."""
    detail: str = ""


@dataclass(frozen=True)
class ExpectedFacts:
    """Facts that a corpus is compared with; None if unknown."""

    receipt: Receipt | None
    vocab_size: int | None
    eod_id: int | None

    def entry(self, section: str, name: str) -> dict[str, Any]:
        """Return the receipt's facts on a file (`files`) or part (`splits`); {} without any."""
        return dict((self.receipt or {}).get(section, {}).get(name, {}))


def verify_corpus(path: str, vocab_size: int | None) -> tuple[Path, list[FileCheck]]:
    """Read a whole corpus; return its folder and all checks. Token ids must be below `vocab_size`, if given.

    Raises UserError if there is no corpus.
    """
    folder, prefixes = corpora_at(path)
    checks, receipt, tokenizer = list[FileCheck](), None, None
    try:
        receipt = read_receipt(folder)
        checks.append(FileCheck(RECEIPT, "receipt", *(("ok",) if receipt else ("note", "no receipt"))))
    except CorruptFileError as error:
        checks.append(failed(error, folder / RECEIPT, "receipt"))
    try:
        tokenizer = tokenizer_beside(folder)
    except UserError as error:
        checks.append(failed(error, folder / TOKENIZER, "tokenizer"))
    if vocab_size is None and receipt is not None:
        vocab_size = receipt["vocab_size"]
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    expected = ExpectedFacts(receipt, vocab_size, eod_of(receipt, tokenizer))
    pairs = [part(prefix) for prefix in prefixes for part in (idx_path, bin_path)]
    listed_files = (expected.receipt or {}).get("files", {}) if Path(path).is_dir() else ()
    other_files = [other_file for name in listed_files if (other_file := folder / name) not in pairs]
    total = sum(path.stat().st_size for path in (*pairs, *other_files) if path.is_file())
    with progress_bar("verifying", total, in_bytes=True) as advance:
        for prefix in prefixes:
            checks += check_pair(prefix, expected, advance)
        checks += [check_digest(other_file, expected, advance) for other_file in other_files]
    return folder, checks


def failed(error: UserError, path: Path, name: str) -> FileCheck:
    """Return the check of a file that raised an error; the command adds path and fix."""
    text = str(error).removeprefix(str(path)).removesuffix(REBUILD)
    return FileCheck(path.name, name, "error", text.lstrip(": ").rstrip(";: "))


def check_pair(prefix: Path, expected: ExpectedFacts, advance: Advance) -> list[FileCheck]:
    idx, tokens = idx_path(prefix), bin_path(prefix)
    for path in (idx, tokens):
        if not path.is_file():
            return [FileCheck(path.name, "format", "error", "is missing: a corpus is a pair")]
    try:
        corpus = IndexedDataset(prefix, allow_empty=True)
    except CorruptFileError as error:
        format_check = failed(error, tokens if str(error).startswith(str(tokens)) else idx, "format")
        return [format_check, *(check_digest(path, expected, advance) for path in (idx, tokens))]
    digest, outside, end_tokens = scan_tokens(corpus, expected, advance)
    counted = {
        "documents": corpus.num_documents,
        "sequences": corpus.num_sequences,
        "tokens": corpus.num_tokens,
        "end_tokens": end_tokens,  # only after documents: texts contain none
    }
    recorded = expected.entry("splits", prefix.name)
    differing = [
        f"{count:,} {key}, {RECEIPT} records {recorded[key]}"
        for key, count in counted.items()
        if count is not None and recorded.get(key, count) != count
    ]
    limit = expected.vocab_size
    ids = ("ok", f"below {limit:,}") if limit is not None else ("note", "no vocabulary known: set vocab_size")
    if outside is not None:
        token, position = outside
        document, bound = corpus.document_of(position), f"not below vocab_size={limit}"
        location = f"document {document}, token {position - corpus.first_token(document)} of it"
        ids = "error", f"{location}, is {token}, {'negative' if token < 0 else bound}"
    return [
        FileCheck(idx.name, "format", "ok", f"{corpus.dtype.name}, {corpus.num_documents:,} documents"),
        FileCheck(tokens.name, "token ids", *ids),
        FileCheck(idx.name, "counts", "error" if differing else "ok", "; ".join(differing)),
        check_digest(idx, expected, advance),
        check_digest(tokens, expected, advance, digest),
    ]


def scan_tokens(
    corpus: IndexedDataset, expected: ExpectedFacts, advance: Advance
) -> tuple[str, tuple[int, int] | None, int | None]:
    """Return a .bin's digest, the first token out of range with its position, and the end-of-document tokens.

    The file is read, not mapped, as mapped pages count as memory of the process. Raises OSError.
    """
    digest, position, outside, end_tokens = xxhash.xxh3_128(), 0, None, 0
    limit = np.iinfo(np.int64).max if expected.vocab_size is None else expected.vocab_size
    with open(corpus.bin_path, "rb") as f:
        while block := f.read(BLOCK):
            digest.update(block)
            ids = np.frombuffer(block, dtype=corpus.dtype)
            if outside is None and (ids.min() < 0 or ids.max() >= limit):
                first = int(((ids < 0) | (ids >= limit)).argmax())
                outside = int(ids[first]), position + first
            if expected.eod_id is not None:
                end_tokens += int((ids == expected.eod_id).sum())
            position += len(ids)
            advance(len(block))
    return digest_name(digest), outside, None if expected.eod_id is None else end_tokens


def check_digest(
    path: Path, expected: ExpectedFacts, advance: Advance, digest: str | None = None
) -> FileCheck:
    """Compare a file, or its `digest`, with its entry in the receipt; one of another size is not read."""
    entry = expected.entry("files", path.name)
    if not path.is_file():
        return FileCheck(path.name, "digest", "error", f"is missing, {RECEIPT} lists it")
    if "digest" not in entry:
        return FileCheck(path.name, "digest", "note", "not compared: no receipt lists the file")
    if (size := path.stat().st_size) != entry.get("bytes", size):
        digest = f"{size} bytes, not {one_line(entry['bytes'])}"
    elif digest is None:
        digest = digest_file(path, advance)
    if digest == entry["digest"]:
        return FileCheck(path.name, "digest", "ok")
    return FileCheck(path.name, "digest", "error", f"is not the file that {RECEIPT} describes: {digest}")
