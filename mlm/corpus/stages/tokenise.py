"""Stage `tokenise`: the kept documents, without the text of evaluation sets, as tokens of each part.

Task 12 leaves train-00012.bin/.idx and so on for every part, and with keep_ids=true
train-00012.origins.bin/.idx.
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

from mlm.corpus.decontaminate import Contaminants
from mlm.corpus.decontaminate import Tally as Contamination
from mlm.corpus.read.long_text import LONG, StoredText, long_tokens
from mlm.corpus.sections import DecontaminateConfig
from mlm.corpus.sentences import long_sentences, split_sentences
from mlm.corpus.stages.clean import BATCH_BYTES, BATCH_DOCUMENTS, TEXT, StoredTexts
from mlm.corpus.stages.markers import Advance, write_marker
from mlm.corpus.stages.match import removed_in
from mlm.corpus.stages.plan import EVALUATION, Plan
from mlm.data.corpus_files import origins_of, parse_split, part_of
from mlm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from mlm.data.tokenizer import Tokenizer

Framed = tuple["array[int]", list[int]]
"""Tokens of a document, and the lengths of its sequences."""

_loaded: dict[tuple[Path, str | None, DecontaminateConfig], Contaminants] = {}


@dataclass
class Part:
    """Counts of one part of the corpus."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    """End-of-document tokens included."""
    bytes: int = 0
    """UTF-8 bytes of text, for bits per byte."""
    end_tokens: int = 0
    """End-of-document tokens: those after documents, as no text holds one."""


@dataclass(frozen=True)
class Piece:
    """A text to tokenise: a document, or a piece of one after decontamination."""

    part: str
    text: str | StoredText
    num_bytes: int
    is_cut: bool
    """True for a piece of a document that was cut."""
    origin: bytes | None
    """Origin, as stage `clean` records it; None without keep_ids."""


@dataclass
class Fates:
    """Account of a task's documents: kept whole, removed by a rule, or cut into pieces.

    documents = kept + removed + cut, and likewise pieces = kept + removed. All bytes of a document that
    is cut are those of its pieces and `cut_bytes`.
    """

    removed: Counter[str] = field(default_factory=Counter)
    removed_pieces: Counter[str] = field(default_factory=Counter)
    removed_bytes: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    pieces: int = 0
    cut_bytes: int = 0

    def remove(self, rule: str, num_bytes: int, *, is_piece: bool = False) -> None:
        """Count a removed document or piece."""
        (self.removed_pieces if is_piece else self.removed)[rule] += 1
        self.removed_bytes[rule] += num_bytes

    def cut_up(self, num_bytes: int, pieces: list[int]) -> None:
        """Count a document that was cut into pieces of these sizes in bytes."""
        self.cut, self.pieces = self.cut + 1, self.pieces + len(pieces)
        self.cut_bytes += num_bytes - sum(pieces)


class Writers:
    """The files of a task: tokens of each part, and the origins of their documents."""

    def __init__(self, plan: Plan, task: int, stack: ExitStack) -> None:
        folder, dtype = plan.stages["tokenise"].folder, token_dtype(plan.load_tokenizer().vocab_size)
        self.parts = {part: Part() for part in plan.parts}
        self.prefixes = {part: folder / f"{part}-{task:05d}" for part in plan.parts}
        self.tokens = {
            part: stack.enter_context(IndexedWriter(prefix, dtype)) for part, prefix in self.prefixes.items()
        }
        self.origins = (
            {
                part: stack.enter_context(IndexedWriter(origins_of(prefix), TEXT))
                for part, prefix in self.prefixes.items()
            }
            if plan.config.keep_ids
            else {}
        )

    def files(self) -> list[Path]:
        """List all files that are written."""
        prefixes = list(self.prefixes.values())
        prefixes += [origins_of(prefix) for prefix in prefixes] if self.origins else []
        return [path(prefix) for prefix in prefixes for path in (bin_path, idx_path)]

    def count(self, piece: Piece, sequences: int, tokens: int, end_tokens: int) -> None:
        """Count a document that was written."""
        part = self.parts[piece.part]
        part.documents += 1
        part.sequences += sequences
        part.tokens += tokens
        part.bytes += piece.num_bytes
        part.end_tokens += end_tokens
        if piece.origin is not None:
            self.origins[piece.part].add_document(piece.origin)


def run(plan: Plan, task: int) -> None:
    """Tokenise the documents of one task of stage `clean`."""
    stage = plan.stages["tokenise"]
    fates, contamination = Fates(), Contamination()
    prefix = plan.stages["clean"].folder / f"{task:05d}"
    texts = StoredTexts(prefix)
    with ExitStack() as stack:
        stack.callback(texts.close)
        writers = Writers(plan, task, stack)
        for batch in batches(pieces(plan, task, texts, contamination, fates)):
            if isinstance(batch[0].text, StoredText):
                write_long(plan, batch[0], batch[0].text, writers, fates)
            else:
                write(plan, batch, writers, fates)
    counts: dict[str, Any] = {
        "parts": {part: vars(count) for part, count in writers.parts.items()},
        "removed": dict(fates.removed),
        "removed_pieces": dict(fates.removed_pieces),
        "removed_bytes": dict(fates.removed_bytes),
        "cut": {"documents": fates.cut, "pieces": fates.pieces, "bytes": fates.cut_bytes},
        "contamination": contamination.to_json(),
    }
    check_balance(counts, len(texts), texts.num_bytes)
    write_marker(stage.folder, task, counts, writers.files())


def check_balance(counts: dict[str, Any], documents: int, num_bytes: int) -> None:
    """Assert that every document and byte is kept or removed."""
    kept = [sum(part[key] for part in counts["parts"].values()) for key in ("documents", "bytes")]
    cut, pieces = counts["cut"], sum(counts["removed_pieces"].values())
    gone = sum(counts["removed"].values()) + cut["documents"] - cut["pieces"] + pieces
    assert documents == kept[0] + gone, counts
    assert num_bytes == kept[1] + sum(counts["removed_bytes"].values()) + cut["bytes"], counts


def pieces(
    plan: Plan,
    task: int,
    texts: StoredTexts,
    contamination: Contamination,
    fates: Fates,
) -> Iterator[Piece]:
    """Yield what remains of the documents of a task."""
    contaminants = load_contaminants(plan) if plan.evaluation else None
    advance, count = Advance(plan.stages["tokenise"].folder, task), len(texts)
    none = np.zeros(count, dtype=bool)
    near, again = removed_in(plan, task) if plan.removes else (none, none)
    shares, split = parse_split(plan.config.split), plan.shards_of(task)[0].split
    origins = (
        IndexedDataset(origins_of(plan.stages["clean"].folder / f"{task:05d}"), allow_empty=True)
        if plan.config.keep_ids
        else None
    )
    for number in range(count):
        raw = texts.raw(number)
        size = len(raw) if isinstance(raw, bytes) else raw.num_bytes
        advance(size)
        if again[number] or near[number]:
            fates.remove("duplicate_id" if again[number] else "near_duplicate", size)
            continue
        blocks = (raw,) if isinstance(raw, bytes) else raw.blocks()
        part = split or part_of(blocks, shares, plan.config.seed)
        text = raw.decode() if isinstance(raw, bytes) else raw
        origin = None if origins is None else origins[number].tobytes()
        if contaminants is None or part not in plan.config.decontaminate.parts:
            yield Piece(part, text, size, False, origin)
            continue
        cleaned = contaminants.clean(text) if isinstance(text, str) else contaminants.clean_long(text)
        contamination.add(cleaned)
        sizes = [size_of(piece) for piece in cleaned.pieces] if cleaned.matches else [size]
        if not cleaned.pieces:
            fates.remove("contaminated", size)
        elif cleaned.matches:
            fates.cut_up(size, sizes)
        for i, num_bytes in enumerate(sizes[: len(cleaned.pieces)]):
            piece = cleaned.pieces[i]
            short = piece if isinstance(piece, str) or num_bytes > LONG else piece.read()
            yield Piece(part, short, num_bytes, bool(cleaned.matches), origin)


def size_of(text: str | StoredText) -> int:
    """UTF-8 bytes of a text."""
    return len(text.encode()) if isinstance(text, str) else text.num_bytes


def load_contaminants(plan: Plan) -> Contaminants:
    """Return the evaluation texts to keep out, cached for a process: hashing them takes seconds."""
    key = (plan.work, plan.evaluation, plan.config.decontaminate)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = Contaminants.load(plan.config.decontaminate, plan.work / EVALUATION)
    return _loaded[key]


def write(plan: Plan, batch: list[Piece], writers: Writers, fates: Fates) -> None:
    """Tokenise a batch of pieces and append each to its part."""
    config, tokenizer = plan.config, plan.load_tokenizer()
    least = config.filter.least_tokens or 1
    texts = [piece.text for piece in batch if isinstance(piece.text, str)]
    sentences = [split_sentences(text) if config.sentences else [text] for text in texts]
    encoded = iter(tokenizer.encode_batch([sentence for group in sentences for sentence in group]))
    bos, eod = ends(plan)
    for piece, group in zip(batch, sentences, strict=True):
        sequences = [ids for ids in (next(encoded) for _ in group) if len(ids)]
        tokens = sum(len(ids) for ids in sequences)
        if tokens < least:
            fates.remove("min_tokens" if tokens else "empty", piece.num_bytes, is_piece=piece.is_cut)
            continue
        writers.tokens[piece.part].add_document(*framed(sequences, bos, eod))
        marks = len(eod) + bos.count(tokenizer.eod_id)
        writers.count(piece, len(sequences), tokens + len(bos) + len(eod), marks)


def write_long(plan: Plan, piece: Piece, text: StoredText, writers: Writers, fates: Fates) -> None:
    """Tokenise a long text and append it to its part piece by piece."""
    tokenizer, least = plan.load_tokenizer(), plan.config.filter.least_tokens or 1
    bos, eod = ends(plan)
    writer, lengths, tokens = writers.tokens[piece.part], array("i"), 0
    held: list[array[int]] | None = [bos]  # until there are enough tokens for a document
    for ids, begins in long_sequences(plan, tokenizer, text):
        if not len(ids):
            continue
        if begins or not lengths:
            lengths.append(0)
        lengths[-1] += len(ids)
        tokens += len(ids)
        if held is not None:
            held.append(ids)
            if tokens < least:
                continue
        for some in [ids] if held is None else held:
            writer.extend(some)
        held = None
    if held is not None:
        fates.remove("min_tokens" if tokens else "empty", piece.num_bytes, is_piece=piece.is_cut)
        return
    writer.extend(eod)
    lengths[0] += len(bos)
    lengths[-1] += len(eod)
    writer.end_document(np.frombuffer(lengths, dtype=np.int32))
    marks = len(eod) + bos.count(tokenizer.eod_id)
    writers.count(piece, len(lengths), tokens + len(bos) + len(eod), marks)


def long_sequences(plan: Plan, tokenizer: Tokenizer, text: StoredText) -> Iterator[tuple["array[int]", bool]]:
    """Yield the tokens of a long text in order, each with True if a sequence begins with them."""
    if not plan.config.sentences:
        yield from ((ids, False) for ids in long_tokens(tokenizer, text.pieces()))
        return
    for sentences in long_sentences(text.pieces()):
        for begin in range(0, len(sentences), BATCH_DOCUMENTS):
            some = tokenizer.encode_batch(sentences[begin : begin + BATCH_DOCUMENTS])
            yield from ((ids, True) for ids in some)


def ends(plan: Plan) -> tuple["array[int]", "array[int]"]:
    """Return the tokens that every document begins and ends with."""
    tokenizer, config = plan.load_tokenizer(), plan.config
    bos = [tokenizer.bos_id] if config.prepend_bos and tokenizer.bos_id is not None else []
    return array("I", bos), array("I", [tokenizer.eod_id] if config.append_eod else [])


def batches(texts: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into batches of bounded size; a long one is alone."""
    batch, size = list[Piece](), 0
    for piece in texts:
        alone = isinstance(piece.text, StoredText)
        if alone and batch:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.num_bytes
        if alone or size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def framed(sequences: "list[array[int]]", bos: "array[int]", eod: "array[int]") -> "Framed":
    """Return a document's tokens with its end tokens, and its sequence lengths. Changes `sequences`."""
    sequences[0][:0] = bos
    sequences[-1] += eod
    tokens = sequences[0] if len(sequences) == 1 else array("I", chain(*sequences))
    return tokens, [len(ids) for ids in sequences]
