"""Stage `clean`: read shards, fix and filter their documents, sign them for deduplication.

Task 12 leaves 00012.bin/.idx, the kept texts as sequences of UTF-8 bytes; 00012.keys.npy, the keys of their
bands [bands, documents]; 00012.ids.npy, digests of their ids; 00012.rejected.jsonl; and with keep_ids=true
00012.origins.bin/.idx, the origin of each text.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from mlm.corpus.fix_text import Cleaner
from mlm.corpus.minhash import Signer
from mlm.corpus.read.long_text import LONG, LongText, Scratch, StoredText, long_tokens
from mlm.corpus.read.read import read_shard
from mlm.corpus.read.records import Document, Rejected
from mlm.corpus.read.shards import check_unchanged
from mlm.corpus.stages.markers import Advance, Counts, write_marker
from mlm.corpus.stages.plan import Plan
from mlm.data.corpus_files import origins_of
from mlm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path
from mlm.data.tokenizer import Tokenizer
from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

TEXT = np.dtype("u1")
BATCH_BYTES = 1 << 20  # text processed together: more of it leaves the caches and takes longer
BATCH_DOCUMENTS = 4096
BYTES_PER_TOKEN = 6  # more than English has on average: most documents are counted by their beginning alone


@dataclass
class Tally:
    """Counts of a task's documents.

    bytes + fixed_bytes = kept_bytes + removed_bytes: a text counts with the bytes that were read if it is
    removed before its tokens are counted, and with its fixed bytes from there on.
    """

    documents: int = 0
    bytes: int = 0
    fixed_bytes: int = 0
    """Bytes that fixing added; negative if it removed some."""
    kept: int = 0
    kept_bytes: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    """Documents removed by each rule."""
    removed_bytes: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    """Records that could not be read and are no documents, by rule."""

    def remove(self, rule: str, num_bytes: int) -> None:
        """Count a document removed by a rule."""
        self.removed[rule] += 1
        self.removed_bytes[rule] += num_bytes

    def settle(self, rule: str | None, num_bytes: int) -> None:
        """Count a fixed document: removed by a rule, or kept."""
        if rule is not None:
            self.remove(rule, num_bytes)
        else:
            self.kept, self.kept_bytes = self.kept + 1, self.kept_bytes + num_bytes


class Shortness:
    """Test for texts with fewer than `least` tokens."""

    def __init__(self, tokenizer: Tokenizer, least: int) -> None:
        self.tokenizer, self.least = tokenizer, least

    def __call__(self, texts: list[str]) -> list[bool]:
        """Test each text."""
        # The beginning decides, up to the end of a word: its tokens are those of the whole.
        heads = [self.head(text) for text in texts]
        short = [len(ids) < self.least for ids in self.tokenizer.encode_batch(heads)]
        doubtful = [i for i, text in enumerate(texts) if short[i] and len(heads[i]) < len(text)]
        whole = self.tokenizer.encode_batch([texts[i] for i in doubtful])
        for i, ids in zip(doubtful, whole, strict=True):
            short[i] = len(ids) < self.least
        return short

    def of_long(self, text: LongText) -> bool:
        """Test one long text."""
        count = 0
        for tokens in long_tokens(self.tokenizer, text.pieces()):
            count += len(tokens)
            if count >= self.least:
                return False
        return True

    def head(self, text: str) -> str:
        """Return the first letters of a text, up to the end of a word."""
        end = text.rfind(" ", 0, self.least * BYTES_PER_TOKEN)
        return text if end <= 0 or len(text) <= self.least * BYTES_PER_TOKEN else text[:end]


class Cleaning:
    """Processing of a task's documents, a few megabytes at a time; a long one alone."""

    def __init__(self, plan: Plan, task: int, stack: ExitStack) -> None:
        config, self.folder = plan.config, plan.stages["clean"].folder
        self.prefix = self.folder / f"{task:05d}"
        self.tally = Tally()
        self._cleaner = Cleaner(config.normalise, config.filter)
        least = config.filter.least_tokens
        self._is_short = Shortness(plan.load_tokenizer(), least) if least else None
        self._signer = Signer(config.dedup) if config.dedup.enabled else None
        self._writer = stack.enter_context(IndexedWriter(self.prefix, TEXT))
        self._origins = (
            stack.enter_context(IndexedWriter(origins_of(self.prefix), TEXT)) if config.keep_ids else None
        )
        self.keys, self.ids = list[NDArray[np.uint64]](), list[int]()
        self._texts, self._held, self._size = list[str](), list[Document](), 0
        self._names = {item.path: item.name for item in plan.inputs}

    def take(self, document: Document) -> None:
        """Process one document."""
        tally = self.tally
        tally.documents, tally.bytes = tally.documents + 1, tally.bytes + document.num_bytes
        if not isinstance(document.content, str):
            self.flush()  # documents stay in order
            self._take_long(document, document.content)
            return
        text, rule = self._cleaner(document.content)
        if rule is None and (not text or text.isspace()):
            rule = "empty"
        if rule is not None:
            tally.remove(rule, document.num_bytes)
            return
        self._texts.append(text)
        self._held.append(document)
        self._size += document.num_bytes
        if self._size >= BATCH_BYTES or len(self._texts) >= BATCH_DOCUMENTS:
            self.flush()

    def flush(self) -> None:
        """Filter the held documents by length and write those that are kept."""
        texts, held = self._texts, self._held
        self._texts, self._held, self._size = [], [], 0
        short = self._is_short(texts) if self._is_short else [False] * len(texts)
        kept = list[str]()
        for text, document, goes in zip(texts, held, short, strict=True):
            content = text.encode()
            self.tally.fixed_bytes += len(content) - document.num_bytes
            self.tally.settle("min_tokens" if goes else None, len(content))
            if not goes:
                kept.append(text)
                self._writer.add_document(np.frombuffer(content, dtype=TEXT))
                self._note(document)
        if self._signer is not None:
            self.keys.append(self._signer.keys(kept))

    def _take_long(self, document: Document, text: LongText) -> None:
        with Scratch(self.folder) as scratch:
            rule = self._cleaner.long(text, scratch)
            if rule is None and scratch.is_blank:
                rule = "empty"
            if rule is not None:
                self.tally.remove(rule, document.num_bytes)
                return
            fixed: StoredText = scratch.text
            self.tally.fixed_bytes += fixed.num_bytes - document.num_bytes
            goes = self._is_short is not None and self._is_short.of_long(fixed)
            self.tally.settle("min_tokens" if goes else None, fixed.num_bytes)
            if goes:
                return
            for block in fixed.blocks():
                self._writer.extend(np.frombuffer(block, dtype=TEXT))
            self._writer.end_document()
            self._note(document)
            if self._signer is not None:
                self.keys.append(self._signer.long_keys(fixed.pieces()))

    def _note(self, document: Document) -> None:
        """Keep the digest of a document's id, and its origin."""
        self.ids.append(xxhash.xxh3_64_intdigest(document.id.encode()) if document.id is not None else 0)
        if self._origins is not None:
            place = document.place
            source = self._names.get(place.source, place.source)
            origin = {"source": source, place.unit.strip() or "line": place.line}
            origin |= {} if document.id is None else {"id": document.id}
            self._origins.add_document(json.dumps(origin).encode())


def run(plan: Plan, task: int) -> None:
    """Clean the shards of a task. With bad_input=refuse, bad input raises UserError."""
    config, folder = plan.config, plan.stages["clean"].folder
    rejects = list[bytes]()

    with ExitStack() as stack:
        cleaning = Cleaning(plan, task, stack)

        def reject(record: Rejected) -> None:
            if config.bad_input == "refuse":
                raise UserError(
                    f"{record.place_text}: {record.detail}: fix or delete it, or set bad_input=skip"
                )
            cleaning.tally.rejected[record.rule] += 1
            line = {"place": record.place_text, "rule": record.rule, "detail": record.detail}
            rejects.append((json.dumps(line) + "\n").encode())

        for document in documents_of(plan, task, reject):
            cleaning.take(document)
            del document  # free a long one before the next is read
        cleaning.flush()
    prefix = cleaning.prefix
    files = [bin_path(prefix), idx_path(prefix)]
    if config.dedup.enabled:
        # a band's keys are contiguous: stage `match` reads one band of all shards
        by_band = np.ascontiguousarray(np.concatenate(cleaning.keys).T)
        files.append(save(prefix.with_name(f"{task:05d}.keys.npy"), by_band))
    if config.id_key is not None:
        ids = np.array(cleaning.ids, dtype=np.uint64)
        files.append(save(prefix.with_name(f"{task:05d}.ids.npy"), ids))
    if config.keep_ids:
        files += [bin_path(origins_of(prefix)), idx_path(origins_of(prefix))]
    rejected = folder / f"{task:05d}.rejected.jsonl"
    write_atomic(rejected, b"".join(rejects))
    write_marker(folder, task, as_counts(cleaning.tally), [*files, rejected])


def documents_of(plan: Plan, task: int, reject: Callable[[Rejected], None]) -> Iterator[Document]:
    """Yield the documents of a task. Raises UserError if a file changes while it is read."""
    config, advance = plan.config, Advance(plan.stages["clean"].folder, task)
    for shard in plan.shards_of(task):
        check_unchanged(plan.input_of(shard))
        yield from read_shard(
            shard,
            text_key=config.text_key,
            id_key=config.id_key,
            max_bytes=config.max_document_bytes,
            reject=reject,
            advance=advance,
            keep_ids=config.keep_ids,
        )
        check_unchanged(plan.input_of(shard))


def as_counts(tally: Tally) -> Counts:
    """Convert a tally to JSON, with the keys of markers and receipts."""
    assert tally.documents == tally.kept + sum(tally.removed.values()), tally
    assert tally.bytes + tally.fixed_bytes == tally.kept_bytes + sum(tally.removed_bytes.values()), tally
    return {
        "documents": tally.documents,
        "bytes": tally.bytes,
        "mended_bytes": tally.fixed_bytes,
        "kept": tally.kept,
        "kept_bytes": tally.kept_bytes,
        "removed": dict(tally.removed),
        "removed_bytes": dict(tally.removed_bytes),
        "rejected": dict(tally.rejected),
    }


def save(path: Path, values: NDArray[np.generic]) -> Path:
    """Write an array as .npy; return its path. Raises OSError."""

    def write(f: BinaryIO) -> None:
        np.lib.format.write_array(f, values, allow_pickle=False)

    write_atomic(path, write)
    return path


class StoredTexts:
    """The texts that stage `clean` kept, by number. A file stays open.

    They are read, not mapped: the pages of a map count as memory of the process, up to the size of the file.
    """

    def __init__(self, prefix: Path) -> None:
        self._index = IndexedDataset(prefix, allow_empty=True)
        self._file = open(self._index.bin_path, "rb", buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Size of all texts."""
        return self._index.num_tokens

    def raw(self, number: int) -> bytes | StoredText:
        """Return a text in UTF-8; a long one stays in its file."""
        begin, size = int(self._index.pointers[number]), int(self._index.lengths[number])
        if size > LONG:
            return StoredText(self._file.fileno(), begin, size)
        return os.pread(self._file.fileno(), size, begin)

    def text(self, number: int) -> str | StoredText:
        """Return a text."""
        found = self.raw(number)
        return found.decode() if isinstance(found, bytes) else found

    def close(self) -> None:
        """Close the file."""
        self._file.close()
