"""Stage `clean`: read shards, mend and filter their documents, sign them for the search for duplicates.

Task 12 leaves 00012.bin/.idx, the kept texts as sequences of UTF-8 bytes; 00012.keys.npy, the
keys of their bands [bands, documents]; 00012.ids.npy, digests of their ids; 00012.rejected.jsonl.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from mlm.config.errors import UserError
from mlm.data.corpus.cleaning import Cleaner
from mlm.data.corpus.markers import Advance, Counts, write_marker
from mlm.data.corpus.plan import Plan
from mlm.data.corpus.read import Document, Rejected, read_shard
from mlm.data.corpus.signatures import Signer
from mlm.data.indexed import IndexedWriter, bin_path, idx_path
from mlm.data.tokenizer import Tokenizer
from mlm.files import write_atomic

TEXT = np.dtype("u1")
BATCH_BYTES = 1 << 20  # text looked at together: more of it leaves the caches and takes longer
BATCH_DOCUMENTS = 4096
BYTES_PER_TOKEN = 6  # more than English has on average: most documents are counted by their beginning alone


@dataclass
class Tally:
    """What became of a shard's documents."""

    documents: int = 0
    bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    """Documents removed by each rule."""
    removed_bytes: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    """Documents that could not be read, by fault."""
    first_rejected: list[str] = field(default_factory=list)

    def remove(self, rule: str, num_bytes: int) -> None:
        self.removed[rule] += 1
        self.removed_bytes[rule] += num_bytes


class Shortness:
    """Whether a text has fewer than `least` tokens."""

    def __init__(self, tokenizer: Tokenizer, least: int) -> None:
        self.tokenizer, self.least = tokenizer, least

    def __call__(self, texts: list[str]) -> list[bool]:
        # A long text is told by its beginning, cut where a word ends: its tokens are those of the whole.
        heads = [self.head(text) for text in texts]
        short = [len(ids) < self.least for ids in self.tokenizer.encode_batch(heads)]
        doubtful = [i for i, text in enumerate(texts) if short[i] and len(heads[i]) < len(text)]
        whole = self.tokenizer.encode_batch([texts[i] for i in doubtful])
        for i, ids in zip(doubtful, whole, strict=True):
            short[i] = len(ids) < self.least
        return short

    def head(self, text: str) -> str:
        """The first letters of a text, up to the end of a word."""
        end = text.rfind(" ", 0, self.least * BYTES_PER_TOKEN)
        return text if end <= 0 or len(text) <= self.least * BYTES_PER_TOKEN else text[:end]


def run(plan: Plan, task: int) -> None:
    """Clean the shards of a task. Raises UserError for bad input that the configuration refuses."""
    config, folder = plan.config, plan.stages["clean"].folder
    tally, rejects = Tally(), list[bytes]()

    def reject(fault: Rejected) -> None:
        if config.bad_input == "refuse":
            raise UserError(f"{fault.place_text}: {fault.detail}: mend or delete it, or set bad_input=skip")
        tally.rejected[fault.rule] += 1
        line = {"place": fault.place_text, "rule": fault.rule, "detail": fault.detail}
        rejects.append((json.dumps(line) + "\n").encode())

    advance = Advance(folder, task)
    documents = chain.from_iterable(
        read_shard(
            shard,
            text_key=config.text_key,
            id_key=config.id_key,
            max_bytes=config.max_document_bytes,
            reject=reject,
            advance=advance,
        )
        for shard in plan.shards_of(task)
    )
    prefix = folder / f"{task:05d}"
    files = [bin_path(prefix), idx_path(prefix)]
    keys, ids = list[NDArray[np.uint64]](), list[int]()
    signer = Signer(config.dedup) if config.dedup.enabled else None
    with IndexedWriter(prefix, TEXT) as writer:
        for texts, batch_ids in kept_batches(plan, documents, tally):
            for text in texts:
                writer.add_document(np.frombuffer(text.encode(), dtype=TEXT))
            ids += batch_ids
            if signer is not None:
                keys.append(signer.keys(texts))
    if signer is not None:
        # a band's keys lie together: stage `match` reads one band of all shards
        by_band = np.ascontiguousarray(np.concatenate(keys).T)
        files.append(save(prefix.with_name(f"{task:05d}.keys.npy"), by_band))
    if config.id_key is not None:
        files.append(save(prefix.with_name(f"{task:05d}.ids.npy"), np.array(ids, dtype=np.uint64)))
    rejected = folder / f"{task:05d}.rejected.jsonl"
    write_atomic(rejected, b"".join(rejects))
    write_marker(folder, task, as_counts(tally), [*files, rejected])


def kept_batches(
    plan: Plan, documents: Iterator[Document], tally: Tally
) -> Iterator[tuple[list[str], list[int]]]:
    """The texts that stay and the digests of their ids, a few megabytes at a time."""
    config = plan.config
    cleaner = Cleaner(config.normalise, config.filter)
    least = config.filter.min_tokens
    is_short = Shortness(plan.load_tokenizer(), least) if least else None
    texts, ids, size = list[str](), list[int](), 0

    def passed() -> tuple[list[str], list[int]]:
        short = is_short(texts) if is_short else [False] * len(texts)
        for text, goes in zip(texts, short, strict=True):
            length = len(text.encode())
            if goes:
                tally.remove("min_tokens", length)
            else:
                tally.kept, tally.kept_bytes = tally.kept + 1, tally.kept_bytes + length
        stays = [i for i, goes in enumerate(short) if not goes]
        return [texts[i] for i in stays], [ids[i] for i in stays]

    for document in documents:
        tally.documents, tally.bytes = tally.documents + 1, tally.bytes + document.num_bytes
        text, rule = cleaner(document.text)
        if rule is None and (not text or text.isspace()):
            rule = "empty"
        if rule is not None:
            tally.remove(rule, document.num_bytes)
            continue
        texts.append(text)
        ids.append(xxhash.xxh3_64_intdigest(document.id.encode()) if document.id is not None else 0)
        size += document.num_bytes
        if size >= BATCH_BYTES or len(texts) >= BATCH_DOCUMENTS:
            yield passed()
            texts, ids, size = [], [], 0
    yield passed()


def as_counts(tally: Tally) -> Counts:
    """A tally as JSON."""
    return {
        "documents": tally.documents,
        "bytes": tally.bytes,
        "kept": tally.kept,
        "kept_bytes": tally.kept_bytes,
        "removed": dict(tally.removed),
        "removed_bytes": dict(tally.removed_bytes),
        "rejected": dict(tally.rejected),
    }


def save(path: Path, values: NDArray[np.generic]) -> Path:
    """Write an array as .npy; its path is returned. Raises OSError."""

    def write(f: BinaryIO) -> None:
        np.lib.format.write_array(f, values, allow_pickle=False)

    write_atomic(path, write)
    return path
