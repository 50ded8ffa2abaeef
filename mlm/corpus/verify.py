"""`mlm data verify`: an integrity check of a corpus.

Every byte is read, once: the tokens are checked while they are digested. Memory stays constant.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mlm.corpus.config import DataVerifyConfig
from mlm.data.corpus_files import (
    MARKER,
    TOKENIZER,
    corpora_at,
    eod_of,
    size_of,
    tokenizer_beside,
)
from mlm.data.indexed import CHUNK, REBUILD, Index, bin_path, idx_path
from mlm.data.receipt import RECEIPT, Receipt, read_receipt
from mlm.util.atomic import digest_file, digest_name
from mlm.util.errors import CheckFailedError, CorruptFileError, UserError
from mlm.util.results import named, write_result
from mlm.util.terminal import Advance, add_row, console, plain, progress_bar, table

BLOCK = 1 << 22  # bytes read at a time: 4 MiB


@dataclass(frozen=True)
class Check:
    """One check of a file. An error fails the command, a note does not."""

    file: str
    name: str
    state: str
    """ok, error or note."""
    detail: str = ""


@dataclass(frozen=True)
class Expected:
    """Facts that a corpus is compared with."""

    receipt: Receipt | None
    vocab_size: int | None
    eod_id: int | None

    def file(self, name: str) -> dict[str, Any]:
        """The receipt's entry of a file; empty when it has none."""
        entry = (self.receipt or {}).get("files", {}).get(name, {})
        return entry if isinstance(entry, dict) else {}

    def part(self, name: str) -> dict[str, Any]:
        """The receipt's counts of a part; empty when it has none."""
        entry = (self.receipt or {}).get("splits", {}).get(name, {})
        return entry if isinstance(entry, dict) else {}


def run_verify(config: DataVerifyConfig) -> None:
    """Read a whole corpus, print a table, write out. Raises CheckFailedError if a check fails."""
    folder, prefixes = corpora_at(config.path)
    checks, expected = expectations(config, folder)
    others = [folder / name for name in other_files(expected, prefixes)] if Path(config.path).is_dir() else []
    files = [path(prefix) for prefix in prefixes for path in (idx_path, bin_path)] + others
    with progress_bar("verifying", sum(map(size_of, files)), in_bytes=True) as advance:
        for prefix in prefixes:
            checks += verify_pair(prefix, expected, advance)
        checks += [digest_check(path, digest_of(path, advance, expected), expected) for path in others]
    if Path(config.path).is_dir():
        checks += strays(folder, prefixes, expected)
    if config.out is not None:
        whole = not any(check.state == "error" for check in checks)
        found = [asdict(check) for check in checks]
        write_result(
            config.out, {"task": "data verify", "path": config.path, "whole": whole, "checks": found}
        )
    show(config, checks)
    errors = [check for check in checks if check.state == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if errors[1:] else ""
        raise CheckFailedError(
            f"{folder / errors[0].file}: {errors[0].detail}{more}: restore it from a copy, or write it again"
        )


def expectations(config: DataVerifyConfig, folder: Path) -> tuple[list[Check], Expected]:
    """Return the facts in receipt and tokenizer; a damaged one is itself an error."""
    checks, receipt, tokenizer = list[Check](), None, None
    try:
        receipt = read_receipt(folder)
        checks.append(Check(RECEIPT, "receipt", *(("ok",) if receipt else ("note", "no receipt"))))
    except CorruptFileError as error:
        checks.append(Check(RECEIPT, "receipt", "error", reason(error, folder / RECEIPT)))
    try:
        tokenizer = tokenizer_beside(folder)
    except UserError as error:
        checks.append(Check(TOKENIZER, "tokenizer", "error", reason(error, folder / TOKENIZER)))
    vocab_size = config.vocab_size
    if vocab_size is None and receipt is not None:
        vocab_size = receipt["vocab_size"]
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    return checks, Expected(receipt, vocab_size, eod_of(receipt, tokenizer))


def reason(error: UserError, path: Path) -> str:
    """Return the problem of a file without its path and fix, which the command adds itself."""
    text = str(error).removeprefix(str(path)).removesuffix(REBUILD)
    return text.lstrip(": ").rstrip(";: ")


def verify_pair(prefix: Path, expected: Expected, advance: Advance) -> list[Check]:
    """Run all checks of one .bin/.idx pair."""
    idx, tokens = idx_path(prefix), bin_path(prefix)
    missing = [path for path in (idx, tokens) if not path.is_file()]
    if missing:
        return [Check(path.name, "files", "error", "is missing: a corpus is a pair") for path in missing]
    try:
        index = Index(idx)
    except CorruptFileError as error:
        digests = [digest_check(path, digest_of(path, advance, expected), expected) for path in (idx, tokens)]
        return [Check(idx.name, "header", "error", reason(error, idx)), *digests]
    problem = index.problem()
    needed, found = index.num_tokens * index.dtype.itemsize, tokens.stat().st_size
    size_problem = "" if needed == found else f"{found} bytes where the index says {needed}"
    if found > needed:  # what follows the tokens is not read, however much it is
        return [Check(tokens.name, "size", "error", size_problem)]
    sound = problem is None and not size_problem
    scan = Scan(index if sound else None, index.dtype, expected)
    checks = [
        Check(idx.name, "header", "ok", f"{index.dtype.name}, {index.num_documents:,} documents"),
        Check(idx.name, "pointers and boundaries", "error" if problem else "ok", problem or ""),
        Check(tokens.name, "size", "error" if size_problem else "ok", size_problem),
        *scan.read(tokens, advance),
        digest_check(idx, digest_of(idx, advance, expected), expected),
        *(counts(prefix.name, index, expected) if sound else ()),
        *(empty_documents(idx.name, index) if sound else ()),
    ]
    return checks


class Scan:
    """One pass over a .bin: token ids, ends of documents, digest.

    `index` is None if it is damaged: errors are then located by their position in the .bin alone.
    """

    def __init__(self, index: Index | None, dtype: np.dtype[Any], expected: Expected) -> None:
        self.index, self.dtype, self.expected = index, dtype, expected
        self.bad: str | None = None
        self.documents_done = self.without_eod = self.end_tokens = 0

    def read(self, path: Path, advance: Advance) -> list[Check]:
        """Check the file. Raises OSError."""
        digest, position, buffer = xxhash.xxh3_128(), 0, bytearray(BLOCK)
        with open(path, "rb", buffering=0) as f:
            while count := fill(f, buffer):
                block = memoryview(buffer)[:count]
                digest.update(block)
                ids = np.frombuffer(block[: count - count % self.dtype.itemsize], dtype=self.dtype)
                self.check_ids(ids, position)
                position += len(ids)
                advance(count)
        limit = self.expected.vocab_size
        state, detail = ("error", self.bad) if self.bad else ("ok", f"below {limit:,}" if limit else "")
        if limit is None and not self.bad:
            state, detail = "note", "not compared: no vocabulary known, set vocab_size=…"
        checks = [Check(path.name, "token ids", state, detail)]
        if self.expected.eod_id is not None and self.index is not None:
            checks += [self.ends(path.name), *self.number_of_ends(path)]
        return [*checks, digest_check(path, digest_name(digest), self.expected)]

    def check_ids(self, ids: NDArray[Any], position: int) -> None:
        """Check the tokens from `position` on."""
        if not len(ids):
            return
        limit = self.expected.vocab_size
        if self.bad is None and (ids.min() < 0 or (limit is not None and ids.max() >= limit)):
            wrong = (ids < 0) if limit is None else (ids < 0) | (ids >= limit)
            self.bad = self.describe(int(ids[wrong.argmax()]), position + int(wrong.argmax()))
        if self.expected.eod_id is not None:
            self.end_tokens += int((ids == self.expected.eod_id).sum())
            if self.index is not None:
                self.count_ends(ids, position)

    def describe(self, token: int, position: int) -> str:
        """Describe a wrong token and its position."""
        limit = self.expected.vocab_size
        bound = "negative" if token < 0 else f"not below vocab_size={limit}"
        if self.index is None:
            return f"token {position} is {token}, {bound}"
        document = self.index.document_of(position)
        start = int(self.index.document_starts(document, document)[0])
        return f"document {document}, token {position - start} of it, is {token}, {bound}"

    def count_ends(self, ids: NDArray[Any], position: int) -> None:
        """Count the documents that end in these tokens without the end-of-document token."""
        assert self.index is not None
        index, end = self.index, position + len(ids)
        # documents whose successor starts at or before the end of the block end in it, or before it
        after = bisect_right(
            range(index.num_documents + 1),
            end,
            lo=self.documents_done,
            key=lambda document: int(index.document_starts(document, document)[0]),
        )
        while self.documents_done < after - 1:
            stop = min(after - 1, self.documents_done + CHUNK)
            starts = index.document_starts(self.documents_done, stop)
            ends = starts[1:][np.diff(starts) > 0]
            self.without_eod += int((ids[ends - 1 - position] != self.expected.eod_id).sum())
            self.documents_done = stop

    def number_of_ends(self, path: Path) -> Iterator[Check]:
        """Compare the number of end-of-document tokens with that of the receipt: no text may hold one."""
        recorded = self.expected.part(path.stem).get("end_tokens")
        if recorded is not None:
            detail = f"{self.end_tokens:,} end-of-document tokens, {RECEIPT} records {plain(recorded)}"
            agrees = recorded == self.end_tokens
            yield Check(path.name, "end-of-document tokens", *(("ok",) if agrees else ("error", detail)))

    def ends(self, name: str) -> Check:
        """Report documents that do not end with the end-of-document token."""
        assert self.index is not None
        if not self.without_eod:
            return Check(name, "ends of documents", "ok")
        detail = (
            f"{self.without_eod:,} of {self.index.num_documents:,} do not end with the token "
            f"{self.expected.eod_id}: as when append_eod=false"
        )
        return Check(name, "ends of documents", "note", detail)


def fill(f: Any, buffer: bytearray) -> int:
    """Read until the buffer is full or the file ends, so that blocks hold whole tokens."""
    view, count = memoryview(buffer), 0
    while count < len(buffer) and (got := f.readinto(view[count:])):
        count += got
    return count


def digest_of(path: Path, advance: Advance, expected: Expected) -> str:
    """Digest of a file, empty if absent. A file whose size differs from the receipt's is not read."""
    entry, found = expected.file(path.name), size_of(path)
    if entry.get("bytes", found) != found:
        return f"{found} bytes, not {plain(entry['bytes'])}"
    return digest_file(path, advance) if path.is_file() and "digest" in entry else ""


def digest_check(path: Path, digest: str, expected: Expected) -> Check:
    """Compare a file with its entry in the receipt."""
    entry = expected.file(path.name)
    if not path.is_file():
        return Check(path.name, "digest", "error", f"is missing, {RECEIPT} lists it")
    if "digest" not in entry:
        return Check(path.name, "digest", "note", "not compared: no receipt lists the file")
    if digest == entry["digest"]:
        return Check(path.name, "digest", "ok")
    return Check(path.name, "digest", "error", f"is not the file that {RECEIPT} describes: {digest}")


def counts(name: str, index: Index, expected: Expected) -> Iterator[Check]:
    """Compare the numbers of documents, sequences and tokens with the receipt."""
    found = {"documents": index.num_documents, "sequences": index.num_sequences, "tokens": index.num_tokens}
    recorded = {key: value for key, value in expected.part(name).items() if key in found}
    wrong = [
        f"{found[key]:,} {key}, {RECEIPT} records {recorded[key]}"
        for key in recorded
        if found[key] != recorded[key]
    ]
    if recorded:
        yield Check(idx_path(Path(name)).name, "counts", "error" if wrong else "ok", "; ".join(wrong))


def empty_documents(name: str, index: Index) -> Iterator[Check]:
    """Report documents without a token."""
    empty = 0
    for begin in range(0, index.num_documents, CHUNK):
        starts = index.document_starts(begin, min(begin + CHUNK, index.num_documents))
        empty += int((np.diff(starts) == 0).sum())
    if empty:
        yield Check(name, "empty documents", "note", f"{empty:,} documents hold no token")


def other_files(expected: Expected, prefixes: list[Path]) -> list[str]:
    """Files that the receipt lists in addition to the pairs."""
    pairs = {path(prefix).name for prefix in prefixes for path in (bin_path, idx_path)}
    return [name for name in (expected.receipt or {}).get("files", {}) if name not in pairs]


def strays(folder: Path, prefixes: list[Path], expected: Expected) -> Iterator[Check]:
    """Report files in the folder that are not part of the corpus."""
    if (folder / MARKER).exists():
        yield Check(MARKER, "stray files", "note", "a build is under way here, or was interrupted")
    for partial in sorted(folder.glob(".*.partial")):
        yield Check(partial.name, "stray files", "note", "left by a writer that was killed")
    if expected.receipt is None:
        return
    for path in (path(prefix) for prefix in prefixes for path in (bin_path, idx_path)):
        if path.is_file() and not expected.file(path.name):
            yield Check(path.name, "stray files", "note", f"{RECEIPT} does not list it")


def show(config: DataVerifyConfig, checks: list[Check]) -> None:
    """Print the table."""
    made = table(f"data verify · {config.path}", "file", "check", "", "")
    for check in checks:
        add_row(made, check.file, check.name, check.state, check.detail)
    console().print(made)
    if config.out is not None:
        console().print(f"written to {named(config.out)}")
