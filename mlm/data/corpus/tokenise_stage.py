"""Stage `tokenise`: the documents that stay, without the text of evaluation sets, as tokens of each part.

Task 12 leaves train-00012.bin/.idx and so on for every part.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mlm.config.corpus_schema import DecontaminateConfig
from mlm.data.corpus.clean_stage import BATCH_BYTES, BATCH_DOCUMENTS
from mlm.data.corpus.decontaminate import Contaminants
from mlm.data.corpus.decontaminate import Tally as Contamination
from mlm.data.corpus.markers import Advance, write_marker
from mlm.data.corpus.match_stage import removed_in
from mlm.data.corpus.plan import EVALUATION, Plan
from mlm.data.corpus.sentences import split_sentences
from mlm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from mlm.data.parts import parse_split, part_of
from mlm.data.tokenizer import Tokenizer

Framed = tuple["array[int]", list[int]]
"""Tokens of a document, and the lengths of its sequences."""

_loaded: dict[tuple[Path, str | None, DecontaminateConfig], Contaminants] = {}


@dataclass
class Part:
    """What went into one part of the corpus."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    """End-of-document tokens included."""
    bytes: int = 0
    """UTF-8 bytes of text, for bits per byte."""
    end_tokens: int = 0
    """End-of-document tokens: no text holds one, so there are those that were put between documents."""


@dataclass(frozen=True)
class Piece:
    """A text to tokenise: a document, or what decontamination left of one."""

    part: str
    text: str
    num_bytes: int


@dataclass
class Removed:
    """Documents removed here, by rule."""

    documents: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, rule: str, num_bytes: int) -> None:
        self.documents[rule] += 1
        self.bytes[rule] += num_bytes


def run(plan: Plan, task: int) -> None:
    """Tokenise what one task of stage `clean` left."""
    stage = plan.stages["tokenise"]
    tokenizer = plan.load_tokenizer()
    texts = IndexedDataset(plan.stages["clean"].folder / f"{task:05d}", allow_empty=True)
    removed, contamination = Removed(), Contamination()
    parts = {part: Part() for part in plan.parts}
    dtype = token_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        writers = {
            part: stack.enter_context(IndexedWriter(stage.folder / f"{part}-{task:05d}", dtype))
            for part in parts
        }
        for batch in batches(pieces(plan, task, texts, contamination, removed)):
            write(plan, tokenizer, batch, writers, parts, removed)
    counts: dict[str, Any] = {
        "parts": {part: vars(count) for part, count in parts.items()},
        "removed": dict(removed.documents),
        "removed_bytes": dict(removed.bytes),
        "contamination": contamination.to_json(),
    }
    prefixes = [stage.folder / f"{part}-{task:05d}" for part in parts]
    files = [path(prefix) for prefix in prefixes for path in (bin_path, idx_path)]
    write_marker(stage.folder, task, counts, files)


def pieces(
    plan: Plan,
    task: int,
    texts: IndexedDataset,
    contamination: Contamination,
    removed: Removed,
) -> Iterator[Piece]:
    """What is left of the documents of a task."""
    contaminants = load_contaminants(plan) if plan.evaluation else None
    advance, count = Advance(plan.stages["tokenise"].folder, task), len(texts)
    none = np.zeros(count, dtype=bool)
    near, again = removed_in(plan, task) if plan.removes else (none, none)
    shares, split = parse_split(plan.config.split), plan.shards_of(task)[0].split
    for number in range(count):
        raw = texts[number].tobytes()
        advance(len(raw))
        if again[number] or near[number]:
            removed.add("duplicate_id" if again[number] else "near_duplicate", len(raw))
            continue
        part = split or part_of(raw, shares, plan.config.seed)
        text = raw.decode()
        if contaminants is None:
            yield Piece(part, text, len(raw))
            continue
        cleaned = contaminants.clean(text)
        contamination.add(cleaned)
        if not cleaned.pieces:
            removed.add("contaminated", len(raw))
        for piece in cleaned.pieces:
            yield Piece(part, piece, len(raw) if piece is text else len(piece.encode()))


def load_contaminants(plan: Plan) -> Contaminants:
    """The evaluation texts to keep out, kept between the tasks of a process: hashing them takes seconds."""
    key = (plan.work, plan.evaluation, plan.config.decontaminate)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = Contaminants.load(plan.config.decontaminate, plan.work / EVALUATION)
    return _loaded[key]


def write(
    plan: Plan,
    tokenizer: Tokenizer,
    batch: list[Piece],
    writers: dict[str, IndexedWriter],
    parts: dict[str, Part],
    removed: Removed,
) -> None:
    """Tokenise texts together and append each to its part."""
    config = plan.config
    least = config.filter.min_tokens or 1
    sentences = [split_sentences(piece.text) if config.sentences else [piece.text] for piece in batch]
    encoded = iter(tokenizer.encode_batch([sentence for group in sentences for sentence in group]))
    bos = array("I", [tokenizer.bos_id] if config.prepend_bos and tokenizer.bos_id is not None else [])
    eod = array("I", [tokenizer.eod_id] if config.append_eod else [])
    for piece, group in zip(batch, sentences, strict=True):
        sequences = [ids for ids in (next(encoded) for _ in group) if len(ids)]
        tokens = sum(len(ids) for ids in sequences)
        if tokens < least:
            removed.add("min_tokens" if tokens else "empty", piece.num_bytes)
            continue
        count = parts[piece.part]
        writers[piece.part].add_document(*framed(sequences, bos, eod))
        count.documents += 1
        count.sequences += len(sequences)
        count.tokens += tokens + len(bos) + len(eod)
        count.bytes += piece.num_bytes
        count.end_tokens += len(eod) + bos.count(tokenizer.eod_id)


def batches(texts: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group texts so that memory stays bounded however many there are."""
    batch, size = list[Piece](), 0
    for piece in texts:
        batch.append(piece)
        size += piece.num_bytes
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def framed(sequences: "list[array[int]]", bos: "array[int]", eod: "array[int]") -> "Framed":
    """The tokens of a document, its ends marked, and the lengths of its sequences. Changes `sequences`."""
    sequences[0][:0] = bos
    sequences[-1] += eod
    tokens = sequences[0] if len(sequences) == 1 else array("I", chain(*sequences))
    return tokens, [len(ids) for ids in sequences]
