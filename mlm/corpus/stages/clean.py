"""Stage `clean`: read shards, fix and filter their documents, sign them for deduplication.

Task 12 writes 00012.bin/.idx, the kept texts as sequences of UTF-8 bytes; 00012.keys.npy, their band keys
[bands, documents]; and 00012.rejected.jsonl.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlm.corpus.filter import Cleaner
from mlm.corpus.minhash import MinHasher
from mlm.corpus.pieces import segments
from mlm.corpus.read.read import read_shard
from mlm.corpus.read.records import BadRecordError, Document
from mlm.corpus.read.shards import check_unchanged
from mlm.corpus.stages.plan import BuildPlan
from mlm.data.indexed import IndexedWriter, bin_path, idx_path
from mlm.data.tokenizer import Tokenizer
from mlm.util.files import write_atomic

TEXT = np.dtype("u1")
BATCH_BYTES = 1 << 20  # text processed together, which fits the caches
BATCH_DOCUMENTS = 4096
BYTES_PER_TOKEN = 6  # more than the average of English, so that most documents are counted by their beginning


def run(plan: BuildPlan, task: int) -> None:
    """Clean the shards of a task.

    Raises UserError if a file changes while it is read; with bad_input=refuse UserError or CorruptFileError
    for bad input.
    """
    config, stage = plan.config, plan.stages["clean"]
    rejects = list[bytes]()
    with ExitStack() as stack:
        cleaning = CleaningTask(plan, task, stack)

        def reject(error: BadRecordError) -> None:
            if config.bad_input == "refuse":
                raise error.to_user_error("fix or delete it, or set bad_input=skip")
            cleaning.counts[f"rejected/{error.rule}"] += 1
            line = {"place": str(error.location), "rule": error.rule, "detail": error.detail}
            rejects.append((json.dumps(line) + "\n").encode())

        for shard in plan.shards[task]:
            check_unchanged(shard.input)
            for document in read_shard(
                shard, text_key=config.text_key, max_bytes=config.max_document_bytes, reject=reject
            ):
                cleaning.take(document)
                del document  # free a long one before the next is read
            check_unchanged(shard.input)
        cleaning.flush()
    prefix = cleaning.prefix
    files = [bin_path(prefix), idx_path(prefix)]
    if config.dedup.enabled:
        # The keys of a band are contiguous, as stage `match` reads one band of all shards.
        by_band = np.ascontiguousarray(np.concatenate(cleaning.keys).T)
        files.append(save(prefix.with_name(f"{task:05d}.keys.npy"), by_band))
    rejected = prefix.with_name(f"{task:05d}.rejected.jsonl")
    write_atomic(rejected, b"".join(rejects))
    stage.finish(task, cleaning.counts, [*files, rejected])


class CleaningTask:
    """Processing of a task's documents, about a megabyte at a time.

    `counts` of documents and bytes: read + fixed = kept + removed. A text that is removed before its tokens
    are counted counts with its bytes as read, others with their fixed bytes.
    """

    def __init__(self, plan: BuildPlan, task: int, stack: ExitStack) -> None:
        config = plan.config
        self.prefix = plan.stages["clean"].folder / f"{task:05d}"
        self.counts = Counter[str](
            {"read/documents": 0, "read/bytes": 0, "fixed/bytes": 0, "kept/documents": 0, "kept/bytes": 0}
        )
        self._cleaner = Cleaner(config.normalise, config.filter)
        self._least = config.filter.least_tokens
        self._tokenizer = plan.load_tokenizer()
        self._min_hasher = MinHasher(config.dedup) if config.dedup.enabled else None
        self._writer = stack.enter_context(IndexedWriter(self.prefix, TEXT))
        self.keys = list[NDArray[np.uint64]]()
        self._batch, self._size = list[Document](), 0

    def take(self, document: Document) -> None:
        self.counts["read/documents"] += 1
        self.counts["read/bytes"] += document.num_bytes
        document.text, rule = self._cleaner(document.text)
        if rule is None and (not document.text or document.text.isspace()):
            rule = "empty"
        if rule is not None:
            remove(self.counts, rule, document.num_bytes)
            return
        self._batch.append(document)
        self._size += document.num_bytes
        if self._size >= BATCH_BYTES or len(self._batch) >= BATCH_DOCUMENTS:
            self.flush()

    def flush(self) -> None:
        batch, self._batch, self._size = self._batch, [], 0
        texts, kept_texts = [document.text for document in batch], list[str]()
        short_numbers = set(find_short(self._tokenizer, texts, self._least)) if self._least else set()
        for number, document in enumerate(batch):
            content = document.text.encode()
            self.counts["fixed/bytes"] += len(content) - document.num_bytes
            if number in short_numbers:
                remove(self.counts, "min_tokens", len(content))
                continue
            self.counts["kept/documents"] += 1
            self.counts["kept/bytes"] += len(content)
            kept_texts.append(document.text)
            self._writer.add_document(np.frombuffer(content, dtype=TEXT))
        if self._min_hasher is not None:
            self.keys.append(self._min_hasher.keys(kept_texts))


def remove(counts: Counter[str], rule: str, num_bytes: int, unit: str = "documents") -> None:
    """Count a document, or a piece of one, that a rule removed."""
    counts[f"removed/{rule}/{unit}"] += 1
    counts[f"removed/{rule}/bytes"] += num_bytes


def find_short(tokenizer: Tokenizer, texts: list[str], least: int) -> Iterator[int]:
    """Yield the indices of texts of fewer than `least` tokens."""
    # The beginning is enough if it ends at a word: its tokens are the document's first ones.
    heads, max_letters = list[str](), least * BYTES_PER_TOKEN
    for text in texts:
        end = text.rfind(" ", 0, max_letters)
        heads.append(next(segments(tokenizer, text if end <= 0 or len(text) <= max_letters else text[:end])))
    for number, (ids, head) in enumerate(zip(tokenizer.encode_batch(heads), heads, strict=True)):
        count, text = len(ids), texts[number]
        if count < least and len(head) < len(text):
            count = sum(len(tokenizer.encode_batch([part])[0]) for part in segments(tokenizer, text))
        if count < least:
            yield number


def save(path: Path, values: NDArray[np.generic]) -> Path:
    write_atomic(path, lambda f: np.lib.format.write_array(f, values, allow_pickle=False))
    return path
