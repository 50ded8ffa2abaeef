"""`mlm data verify`: an integrity check of a corpus.

Every byte is read, once: the tokens are checked while they are digested. Memory stays constant.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mlm.corpus.config import DataVerifyConfig
from mlm.data.corpus_files import (
    TOKENIZER,
    corpora_at,
    eod_of,
    size_of,
    tokenizer_beside,
)
from mlm.data.indexed import REBUILD, Index, bin_path, idx_path
from mlm.data.receipt import RECEIPT, Receipt, read_receipt
from mlm.util.errors import CheckFailedError, CorruptFileError, UserError
from mlm.util.files import digest_file, digest_name
from mlm.util.results import target_name, write_result
from mlm.util.terminal import Advance, add_row, console, one_line, progress_bar, table

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

    def entry(self, section: str, name: str) -> dict[str, Any]:
        """The receipt's facts on a file (`files`) or part (`splits`); empty when it has none."""
        entry = (self.receipt or {}).get(section, {}).get(name, {})
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
    if config.out is not None:
        whole = not any(check.state == "error" for check in checks)
        facts = {"whole": whole, "checks": [asdict(check) for check in checks]}
        write_result(config.out, {"task": "data verify", "path": config.path, **facts})
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
    needed, size = index.num_tokens * index.dtype.itemsize, tokens.stat().st_size
    size_problem = "" if needed == size else f"{size} bytes where the index says {needed}"
    if size > needed:  # what follows the tokens is not read, however much it is
        return [Check(tokens.name, "size", "error", size_problem)]
    sound = problem is None and not size_problem
    return [
        Check(idx.name, "header", "ok", f"{index.dtype.name}, {index.num_documents:,} documents"),
        Check(idx.name, "pointers and boundaries", "error" if problem else "ok", problem or ""),
        Check(tokens.name, "size", "error" if size_problem else "ok", size_problem),
        *scan(tokens, index, expected, advance, sound=sound),
        digest_check(idx, digest_of(idx, advance, expected), expected),
        *(counts(prefix.name, index, expected) if sound else ()),
    ]


def scan(path: Path, index: Index, expected: Expected, advance: Advance, *, sound: bool) -> Iterator[Check]:
    """Read a .bin once: check its token ids, count end-of-document tokens, digest it. Raises OSError.

    Not `sound`, the index is damaged: a wrong token is then located by its position in the .bin alone.
    """
    digest, position, buffer, dtype = xxhash.xxh3_128(), 0, bytearray(BLOCK), index.dtype
    limit, wrong, end_tokens = expected.vocab_size, None, 0
    with open(path, "rb", buffering=0) as f:
        while count := fill(f, buffer):
            block = memoryview(buffer)[:count]
            digest.update(block)
            ids = np.frombuffer(block[: count - count % dtype.itemsize], dtype=dtype)
            if wrong is None and len(ids) and (ids.min() < 0 or (limit is not None and ids.max() >= limit)):
                mask = (ids < 0) if limit is None else (ids < 0) | (ids >= limit)
                wrong = int(ids[mask.argmax()]), position + int(mask.argmax())
            if expected.eod_id is not None:
                end_tokens += int((ids == expected.eod_id).sum())
            position += len(ids)
            advance(count)
    if wrong is not None:
        yield Check(path.name, "token ids", "error", describe(*wrong, limit, index if sound else None))
    elif limit is None:
        yield Check(path.name, "token ids", "note", "not compared: no vocabulary known, set vocab_size=…")
    else:
        yield Check(path.name, "token ids", "ok", f"below {limit:,}")
    recorded = expected.entry("splits", path.stem).get("end_tokens")
    if sound and expected.eod_id is not None and recorded is not None:
        detail = f"{end_tokens:,} end-of-document tokens, {RECEIPT} records {one_line(recorded)}"
        agrees = recorded == end_tokens  # no text may hold one
        yield Check(path.name, "end-of-document tokens", *(("ok",) if agrees else ("error", detail)))
    yield digest_check(path, digest_name(digest), expected)


def describe(token: int, position: int, limit: int | None, index: Index | None) -> str:
    """Describe a wrong token and its position."""
    bound = "negative" if token < 0 else f"not below vocab_size={limit}"
    if index is None:
        return f"token {position} is {token}, {bound}"
    document = index.document_of(position)
    start = int(index.document_starts(document, document)[0])
    return f"document {document}, token {position - start} of it, is {token}, {bound}"


def fill(f: Any, buffer: bytearray) -> int:
    """Read until the buffer is full or the file ends, so that blocks hold whole tokens."""
    view, count = memoryview(buffer), 0
    while count < len(buffer) and (got := f.readinto(view[count:])):
        count += got
    return count


def digest_of(path: Path, advance: Advance, expected: Expected) -> str:
    """Digest of a file, empty if absent. A file whose size differs from the receipt's is not read."""
    entry, num_bytes = expected.entry("files", path.name), size_of(path)
    if entry.get("bytes", num_bytes) != num_bytes:
        return f"{num_bytes} bytes, not {one_line(entry['bytes'])}"
    return digest_file(path, advance) if path.is_file() and "digest" in entry else ""


def digest_check(path: Path, digest: str, expected: Expected) -> Check:
    """Compare a file with its entry in the receipt."""
    entry = expected.entry("files", path.name)
    if not path.is_file():
        return Check(path.name, "digest", "error", f"is missing, {RECEIPT} lists it")
    if "digest" not in entry:
        return Check(path.name, "digest", "note", "not compared: no receipt lists the file")
    if digest == entry["digest"]:
        return Check(path.name, "digest", "ok")
    return Check(path.name, "digest", "error", f"is not the file that {RECEIPT} describes: {digest}")


def counts(name: str, index: Index, expected: Expected) -> Iterator[Check]:
    """Compare the numbers of documents, sequences and tokens with the receipt."""
    counted = {"documents": index.num_documents, "sequences": index.num_sequences, "tokens": index.num_tokens}
    recorded = {key: value for key, value in expected.entry("splits", name).items() if key in counted}
    wrong = [
        f"{counted[key]:,} {key}, {RECEIPT} records {recorded[key]}"
        for key in recorded
        if counted[key] != recorded[key]
    ]
    if recorded:
        yield Check(idx_path(Path(name)).name, "counts", "error" if wrong else "ok", "; ".join(wrong))


def other_files(expected: Expected, prefixes: list[Path]) -> list[str]:
    """Files that the receipt lists in addition to the pairs."""
    pairs = {path(prefix).name for prefix in prefixes for path in (bin_path, idx_path)}
    return [name for name in (expected.receipt or {}).get("files", {}) if name not in pairs]


def show(config: DataVerifyConfig, checks: list[Check]) -> None:
    """Print the table."""
    made = table(f"data verify · {config.path}", "file", "check", "", "")
    for check in checks:
        add_row(made, check.file, check.name, check.state, check.detail)
    console().print(made)
    if config.out is not None:
        console().print(f"written to {target_name(config.out)}")
