"""corpus.json, the receipt of a built corpus, and the checks of a corpus before training on it."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlm.data.gpt import too_short
from mlm.data.indexed import REBUILD, IndexedDataset, bin_path
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import (
    WHOLE,
    digest_file,
    dump_json,
    parse_json,
    read_bounded,
    sampled_digest,
    whole_number,
    write_atomic,
)

RECEIPT = "corpus.json"
MARKER = ".building"
"""Marker in a corpus folder whose build runs or was killed: its files may be replaced."""
REJECTED = "rejected.jsonl"
INPUTS = "corpus-inputs.jsonl"
Receipt = dict[str, Any]


def read_receipt(folder: Path) -> Receipt | None:
    """Read the receipt of a corpus folder, None if it has none. Raises CorruptFileError."""
    path = folder / RECEIPT
    if not path.is_file():
        return None
    content = read_bounded(path, 1 << 24, REBUILD)  # 16 MiB: parsed JSON takes many times its size
    try:
        receipt: Receipt = parse_json(content)
    except ValueError as error:
        raise CorruptFileError(f"{path} is not JSON: {REBUILD}") from error
    try:
        whole_number(receipt["vocab_size"])
        for table in (receipt.get("splits", {}), receipt.get("files", {})):
            for name, entry in table.items():
                if Path(name).name != name:
                    raise ValueError(f"{name} is not a name of a file")
                for key in ("bytes", "documents", "sequences", "tokens", "end_tokens"):
                    whole_number(entry.get(key, 0))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CorruptFileError(f"{path} is not a corpus receipt: {REBUILD}") from error
    return receipt


def write_receipt(folder: Path, facts: Receipt, files: list[str]) -> Receipt:
    """Write corpus.json: settings and inputs, counts, and digests of its files. Raises OSError."""
    receipt = {
        **facts,
        "files": {name: file_entry(folder / name) for name in files},
        "versions": versions(),
    }
    write_atomic(folder / RECEIPT, dump_json(receipt))
    return receipt


def versions() -> dict[str, str]:
    """Return the releases of Python and of the packages that a corpus's content depends on."""
    packages = ("mlm", "tokenizers", "numpy", "ftfy", "rensa", "resiliparse")
    return {"python": platform.python_version()} | {name: version_of(name) for name in packages}


def version_of(package: str) -> str:
    """Return the release of a package; "unknown" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def file_entry(path: Path) -> Receipt:
    size = path.stat().st_size
    sampled = {"sampled": sampled_digest(path)} if size > WHOLE else {}
    return {"bytes": size, "digest": digest_file(path), **sampled}


def damaged_file(folder: Path, receipt: Receipt) -> str | None:
    """Return the first file that differs from the receipt, or None. Reads all files in full."""
    for name, entry in receipt.get("files", {}).items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.get("bytes") or file_entry(path) != entry:
            return str(name)
    return None


def check_corpus(prefix: str | Path, *, vocab_size: int, seq_length: int, min_samples: int) -> list[str]:
    """Return problems that would stop training on a corpus, one line each with its fix.

    `min_samples` is a global batch. The vocabulary size is in the receipt; without one the tokens are scanned
    for the largest id.
    """
    if problem := incomplete_problem(prefix):
        return [problem]
    try:
        indexed = IndexedDataset(prefix)
    except UserError as error:
        return list(error.problems)
    except OSError as error:
        return [f"{error.filename or prefix}: {error.strerror}: set data.path to a corpus that can be read"]
    problems = list[str]()
    windows = max(0, indexed.num_tokens - 1) // seq_length
    if windows == 0:
        problems.append(too_short(indexed, seq_length))
    elif windows < min_samples:
        problems.append(
            f"{indexed.bin_path} holds {windows} windows of data.seq_length={seq_length}, fewer than "
            f"train.global_batch_size={min_samples}: lower train.global_batch_size to {windows} or less, "
            "lower data.seq_length, or set data.path to a larger corpus"
        )
    if vocabulary := vocabulary_problem(indexed, vocab_size):
        problems.append(vocabulary)
    if not problems and (altered := content_problem(indexed)):
        raise CorruptFileError(altered)
    return problems


def incomplete_problem(prefix: str | Path) -> str | None:
    """Return the problem of a folder in which a build, merge or split was interrupted, or None."""
    folder = Path(prefix).parent
    if (folder / MARKER).exists():
        return f"{folder} is incomplete: run the command again that was interrupted there"
    return None


def content_problem(indexed: IndexedDataset) -> str | None:
    """Return the problem of tokens that differ from the receipt; None if equal, or without a digest.

    Files up to 64 MiB are read in full, of larger ones 64 samples; `mlm data verify` reads every byte.
    """
    path = indexed.bin_path
    try:
        entry = (read_receipt(indexed.prefix.parent) or {}).get("files", {}).get(path.name, {})
        recorded = entry.get("digest" if indexed.bin_bytes <= WHOLE else "sampled")
        if recorded is None or (digest := indexed.sampled_digest()) == recorded:
            return None
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror}: set data.path to a corpus that can be read"
    return (
        f"{path}: altered since it was written, digest {digest}, {RECEIPT} has {recorded}. Restore it from a "
        "copy, or write the corpus again with `mlm data build`"
    )


def vocabulary_problem(indexed: IndexedDataset, vocab_size: int) -> str | None:
    try:
        receipt = read_receipt(indexed.prefix.parent)
        entry = (receipt or {}).get("files", {}).get(bin_path(indexed.prefix).name)
        if receipt is None or entry is None:
            needed, subject = indexed.max_token() + 1, f"{indexed.bin_path} holds the token id"
        else:
            if entry.get("bytes") != indexed.bin_bytes:
                return (
                    f"{indexed.bin_path} is not the file that its {RECEIPT} describes: write the corpus "
                    f"again with `mlm data build`, or set data.path to another"
                )
            needed, subject = receipt["vocab_size"], f"{indexed.bin_path} was written with token ids up to"
    except UserError as error:
        return str(error)
    if needed <= vocab_size:
        return None
    return (
        f"{subject} {needed - 1}, model.vocab_size={vocab_size} ends at {vocab_size - 1}: set "
        f"model.vocab_size={needed}, or set data.path to a corpus of another tokenizer"
    )
