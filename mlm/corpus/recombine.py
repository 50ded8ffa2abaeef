"""`mlm data merge`, which joins corpora, and `mlm data split`, which divides one by documents.

The kernel copies the tokens, in the order of Megatron-LM's `merge_datasets.py`; documents are divided in
sequence, as by its `--split`. If every input has a receipt, so has the result.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from mlm.corpus.build import reject_corpus, sole_build
from mlm.data.config import SPLITS
from mlm.data.corpus_files import TOKENIZER, corpora_at
from mlm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path
from mlm.data.receipt import (
    MARKER,
    RECEIPT,
    Receipt,
    content_problem,
    incomplete_problem,
    read_receipt,
    write_receipt,
)
from mlm.util.errors import CorruptFileError, UserError, writing_to
from mlm.util.files import digest_file, write_atomic
from mlm.util.ownership import claim_folder, delete_owned, kind_of_folder
from mlm.util.terminal import add_row, console, table

SAME = ("tokenizer", "vocab_size", "eod_id", "bos_id", "append_eod", "prepend_bos", "sentences")
"""Facts of a receipt that must be equal to merge corpora."""
KEPT = ("format", "eod", "recipe", "evaluation_texts")
"""Facts of a receipt that the result keeps if they are equal."""


def merge_corpora(paths: Sequence[str], out: str) -> None:
    """Write a corpus of all documents of others, part by part in the order of `paths`.

    A folder with train.bin contributes to each part; pairs of other folders, and the pair of a prefix, go
    into train. Raises UserError, CorruptFileError for a damaged corpus.
    """
    parts = dict[str, list[IndexedDataset]]()
    for path in paths:
        _, prefixes = corpora_at(path)
        names = [prefix.name for prefix in prefixes]
        has_parts = Path(path).is_dir() and "train" in names
        if has_parts and (other_names := set(names) - {*SPLITS}):
            raise UserError(
                f"{path} holds {min(other_names)} next to its parts: name the pairs to merge one by one"
            )
        for prefix in prefixes:
            parts.setdefault(prefix.name if has_parts else "train", []).append(open_pair(prefix))
    corpora = [corpus for part_corpora in parts.values() for corpus in part_corpora]
    first = corpora[0]
    if odd := next((corpus for corpus in corpora if corpus.dtype != first.dtype), None):
        raise UserError(
            f"{first.idx_path} holds {first.dtype.name} tokens and {odd.idx_path} {odd.dtype.name}: "
            "merge corpora of one tokenizer"
        )
    folders = list(dict.fromkeys(corpus.prefix.parent for corpus in corpora))
    receipts = {folder: read_receipt(folder) for folder in folders}
    facts = common_facts(receipts)
    if facts is not None:
        facts["splits"] = {part: add_counts(parts[part], receipts) for part in SPLITS if part in parts}
        facts["merged"] = [digest_file(folder / RECEIPT) for folder in folders]
    ranges = {
        part: [(corpus, 0, corpus.num_documents) for corpus in parts[part]]
        for part in SPLITS
        if part in parts
    }
    write_parts(ranges, out, paths, tokenizer_of(folders), facts)


def split_corpus(path: str, out: str, split: str) -> None:
    """Write a corpus whose parts are consecutive documents of another. Raises UserError, CorruptFileError."""
    folder, prefixes = corpora_at(path)
    if len(prefixes) > 1:
        raise UserError(f"path={path} holds {len(prefixes)} pairs: name one, such as path={prefixes[0]}")
    corpus = open_pair(prefixes[0])
    ranges = dict[str, list[tuple[IndexedDataset, int, int]]]()
    splits = dict[str, dict[str, int]]()
    for part, begin, end in split_bounds(split, corpus.num_documents):
        if begin == end:
            raise UserError(
                f"split={split} gives {part} none of {corpus.num_documents} documents of {corpus.prefix}: "
                "give it a larger share, or 0 to leave it out"
            )
        ranges[part] = [(corpus, begin, end)]
        sequences = corpus.document_indices[end] - corpus.document_indices[begin]
        tokens = corpus.first_token(end) - corpus.first_token(begin)
        splits[part] = {"documents": end - begin, "sequences": int(sequences), "tokens": tokens}
    facts = common_facts({folder: read_receipt(folder)})
    if facts is not None:
        facts |= {"splits": splits, "split_of": digest_file(folder / RECEIPT)}
    write_parts(ranges, out, [path], tokenizer_of([folder]), facts)


def split_bounds(split: str, documents: int) -> Iterator[tuple[str, int, int]]:
    """Yield each part of `split`, its first document and the one after its last, as in Megatron-LM.

    Raises UserError unless `split` is up to three weights.
    """
    try:
        weights = [float(weight) for weight in re.split("[/,]", split)]
    except ValueError:
        weights = []
    total = sum(weights)
    is_valid = 0 < len(weights) <= len(SPLITS) and all(weight >= 0 for weight in weights)  # no nan
    if not is_valid or not weights[0] or total == float("inf"):
        raise UserError(
            f"split={split} is not weights of train, validation and test; write for example split=969/30/1"
        )
    bounds = accumulate((weight / total for weight in weights), initial=0.0)
    for part, (begin, end) in zip(SPLITS, pairwise(bounds), strict=False):
        if begin < end:
            yield part, round(begin * documents), round(end * documents)


def open_pair(prefix: Path) -> IndexedDataset:
    """Open a pair that agrees with its receipt, if it has one. Raises UserError, CorruptFileError."""
    if incomplete := incomplete_problem(prefix):
        raise UserError(incomplete)
    corpus = IndexedDataset(prefix)
    if corpus.stored is not None:
        raise UserError(f"{corpus.bin_path}: its tokens are {corpus.stored.source.url}; copy them to a disk")
    if altered := content_problem(corpus):
        raise CorruptFileError(altered)
    return corpus


def common_facts(receipts: dict[Path, Receipt | None]) -> Receipt | None:
    """Return the common facts of receipts; None unless all folders have one.

    Raises UserError if they differ in SAME.
    """
    present = [receipt for receipt in receipts.values() if receipt is not None]
    for key in SAME:
        values = [receipt.get(key) for receipt in present]
        if odd := next((i for i, value in enumerate(values) if value != values[0]), 0):
            folders = [folder for folder, receipt in receipts.items() if receipt is not None]
            raise UserError(
                f"{folders[0]} and {folders[odd]} differ in {key}: merge corpora of one tokenizer and form"
            )
    if len(present) < len(receipts):
        return None
    first, *others = present
    shared = [key for key in KEPT if all(receipt.get(key) == first.get(key) for receipt in others)]
    return {key: first.get(key) for key in (*SAME, *shared)}


def add_counts(corpora: Sequence[IndexedDataset], receipts: dict[Path, Receipt | None]) -> dict[str, int]:
    """Add up the counts of a part that every receipt has."""
    entries = [(receipts[c.prefix.parent] or {}).get("splits", {}).get(c.prefix.name, {}) for c in corpora]
    keys = [key for key in entries[0] if all(key in entry for entry in entries)]
    total = Counter[str]()
    for entry in entries:
        total.update({key: entry[key] for key in keys})
    return dict(total)


def tokenizer_of(folders: Sequence[Path]) -> bytes | None:
    """Return the tokenizer.json of all folders; None if one is missing or differs."""
    files = [folder / TOKENIZER for folder in folders]
    contents = {file.read_bytes() if file.is_file() else None for file in files}
    return contents.pop() if len(contents) == 1 else None


def write_parts(
    parts: dict[str, list[tuple[IndexedDataset, int, int]]],
    out: str,
    inputs: Sequence[str],
    tokenizer: bytes | None,
    facts: Receipt | None,
) -> None:
    """Write the documents begin … end - 1 of corpora as parts of the folder `out`, its receipt last.

    The folder is claimed, and marked as incomplete until then. Raises UserError.
    """
    folder, rows, names = Path(out), table(out, "part", "documents#", "tokens#"), list[str]()
    same_files: dict[str, Any] = {} if tokenizer is None else {TOKENIZER: tokenizer}
    is_corpus = kind_of_folder(folder) == "corpus"
    with writing_to(out), ExitStack() as stack:
        claim_folder(folder, "corpus", inputs=inputs, same=same_files)
        stack.enter_context(sole_build(folder))
        reject_corpus(folder)
        if is_corpus and (folder / MARKER).exists():
            if (folder / MARKER).stat().st_size:  # only the marker of a build has content
                raise UserError(
                    f"out={out} holds an interrupted `mlm data build`: finish it, or set another out="
                )
            old_names = (*(f"{part}.{end}" for part in SPLITS for end in ("bin", "idx")), RECEIPT, TOKENIZER)
            delete_owned(folder, "corpus", inputs=inputs, names=old_names, keep_folder=True)
        write_atomic(folder / MARKER, b"")
        with ExitStack() as writers:  # all parts appear at the end, train last
            for part, ranges in parts.items():
                writer = writers.enter_context(IndexedWriter(folder / part, ranges[0][0].dtype))
                for corpus, begin, end in ranges:
                    writer.append(corpus, begin, end)
                names += [path(Path(part)).name for path in (bin_path, idx_path)]
                add_row(rows, part, f"{writer.num_documents:,}", f"{writer.num_tokens:,}")
        if tokenizer is not None:
            write_atomic(folder / TOKENIZER, tokenizer)
            names.append(TOKENIZER)
        if facts is not None:
            write_receipt(folder, facts, names)
        (folder / MARKER).unlink()
    console().print(rows)
    if facts is None:
        console().print(f"no {RECEIPT}: not every corpus that was read has one")
