"""Stage `tokenise`: the kept documents, without text of evaluation sets, as tokens of each part.

Task 12 writes train-00012.bin/.idx, and likewise for every part.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from mlm.corpus.benchmarks import load_benchmarks
from mlm.corpus.config import DecontaminateConfig
from mlm.corpus.decontaminate import NGramIndex
from mlm.corpus.pieces import segments, split_sentences
from mlm.corpus.stages.clean import BATCH_BYTES, BATCH_DOCUMENTS, remove
from mlm.corpus.stages.match import load
from mlm.corpus.stages.passages import passages_of
from mlm.corpus.stages.plan import EVALUATION, BuildPlan
from mlm.data.corpus_files import parse_split, split_of_document
from mlm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype

PART_COUNTS = ("documents", "sequences", "tokens", "bytes", "end_tokens")
"""Counts of a part: tokens include end-of-document tokens, bytes are UTF-8 text (for bits per byte); texts
contain no end-of-document tokens."""
MATCHES = "matches/"
"""Prefix of the counts of documents with a match (`NGramIndex.report`)."""
NEAR_DUPLICATE = "near_duplicate"

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """A text to tokenise: a document, a passage of one, or a piece of either after decontamination."""

    part: str
    text: str
    num_bytes: int
    unit: str
    """"documents", or "pieces" for one that was split or cut."""


def run(plan: BuildPlan, task: int) -> None:
    counts = Counter({f"splits/{part}/{key}": 0 for part in plan.parts for key in PART_COUNTS})
    with ExitStack() as stack:
        texts = IndexedDataset(plan.stages["clean"].folder / f"{task:05d}", allow_empty=True)
        dtype, folder = token_dtype(plan.load_tokenizer().vocab_size), plan.stages["tokenise"].folder
        prefixes = {part: folder / f"{part}-{task:05d}" for part in plan.parts}
        writers = {part: stack.enter_context(IndexedWriter(path, dtype)) for part, path in prefixes.items()}
        for batch in grouped(pieces(plan, task, texts, counts), lambda piece: piece.num_bytes):
            write(plan, batch, writers, counts)
    files = [path(prefix) for prefix in prefixes.values() for path in (bin_path, idx_path)]
    plan.stages["tokenise"].finish(task, counts, files)


def pieces(plan: BuildPlan, task: int, texts: IndexedDataset, counts: Counter[str]) -> Iterator[Piece]:
    config, index, matches = plan.config, load_ngram_index(plan), Counter[str]()
    unit = "documents" if plan.held_out is None else "pieces"
    for batch in grouped(parts_of_documents(plan, task, texts, counts), lambda document: len(document[1])):
        searched = [content.decode() if part in config.decontaminate.parts else "" for part, content in batch]
        suspects = index.suspects(searched) if index else np.zeros(len(batch), dtype=bool)
        for (part, content), is_suspect in zip(batch, suspects.tolist(), strict=True):
            if part == NEAR_DUPLICATE:
                remove(counts, NEAR_DUPLICATE, len(content))
                continue
            text = content.decode()
            cleaned = index.clean(text) if index and is_suspect else None
            if cleaned is None or cleaned.outcome == "kept":
                yield Piece(part, text, len(content), unit)
                continue
            matches[cleaned.outcome] += 1
            matches["letters"] += cleaned.letters_removed
            matches.update({f"set {match.set}" for match in cleaned.matches})
            matches.update({f"text {match.number}" for match in cleaned.matches})
            if cleaned.outcome == "dropped":
                remove(counts, "contaminated", len(content), unit)
                continue
            sizes = [len(piece.encode()) for piece in cleaned.pieces]
            cut = {"documents": 1, "pieces": len(sizes), "bytes": len(content) - sum(sizes)}
            counts.update({f"cut/{key}": count for key, count in cut.items()})
            for piece, num_bytes in zip(cleaned.pieces, sizes, strict=True):
                yield Piece(part, piece, num_bytes, "pieces")
    counts.update({MATCHES + name: count for name, count in matches.items()})


def parts_of_documents(
    plan: BuildPlan, task: int, texts: IndexedDataset, counts: Counter[str]
) -> Iterator[tuple[str, bytes]]:
    """Yield (part, text) of the documents of a task, or of their passages; part NEAR_DUPLICATE to remove."""
    config, is_near_duplicate = plan.config, np.zeros(len(texts), dtype=bool)
    if config.dedup.enabled:
        folder = plan.stages["gather"].folder
        first, removed = int(load(folder / "firsts.npy")[task]), load(folder / "near.npy")
        begin, end = np.searchsorted(removed, [first, first + len(texts)])
        is_near_duplicate[removed[begin:end] - first] = True
    shares, split = parse_split(config.split), plan.shards[task][0].input.split
    for number in range(len(texts)):
        content = texts[number].tobytes()
        if is_near_duplicate[number]:
            yield NEAR_DUPLICATE, content
        elif plan.held_out is None:
            yield split or split_of_document(content, shares, config.seed), content
        else:
            passages = list(passages_of(plan, content))
            counts.update({"passages/documents": 1, "passages/pieces": len(passages)})
            yield from passages


def load_ngram_index(plan: BuildPlan) -> NGramIndex | None:
    """Return the n-grams of the evaluation texts to keep out, cached between the tasks of a process."""
    if plan.evaluation is None:
        return None
    return _load_ngram_index(plan.work / EVALUATION, plan.evaluation, plan.config.decontaminate)


@lru_cache(maxsize=1)
def _load_ngram_index(path: Path, _digest: str, config: DecontaminateConfig) -> NGramIndex:
    return NGramIndex(config, load_benchmarks(path))


def write(
    plan: BuildPlan, batch: list[Piece], writers: dict[str, IndexedWriter], counts: Counter[str]
) -> None:
    config, tokenizer = plan.config, plan.load_tokenizer()
    # min_tokens=auto is a rule for documents, not for passages; a number applies to both.
    is_off = plan.held_out is not None and config.filter.min_tokens == "auto"
    least = 1 if is_off else config.filter.least_tokens or 1
    dtype = token_dtype(tokenizer.vocab_size)
    bos = [tokenizer.prefix_id] if config.prepend_bos else []
    eod = [tokenizer.eod_id] if config.append_eod else []
    first, last = np.array(bos, dtype), np.array(eod, dtype)
    texts = list[list[list[str]]]()  # segments of each sequence of each piece
    for piece in batch:
        if config.sentences:
            texts.append([[sentence] for sentence in split_sentences(piece.text)])
        else:
            texts.append([list(segments(tokenizer, piece.text))])
    flat = (segment for sequences in texts for sequence in sequences for segment in sequence)
    encoded = (ids for group in grouped(flat, len) for ids in tokenizer.encode_batch(group))
    for piece, piece_texts in zip(batch, texts, strict=True):
        sequences = [[np.array(next(encoded), dtype) for _ in sequence] for sequence in piece_texts]
        lengths = [count for ids in sequences if (count := sum(map(len, ids)))]
        if (tokens := sum(lengths)) < least:
            remove(counts, "min_tokens" if tokens else "empty", piece.num_bytes, piece.unit)
            continue
        lengths[0] += len(first)
        lengths[-1] += len(last)
        content = np.concatenate([first, *(ids for sequence in sequences for ids in sequence), last])
        writers[piece.part].add_document(content, lengths)
        values = (1, len(lengths), sum(lengths), piece.num_bytes, len(eod) + bos.count(tokenizer.eod_id))
        for key, value in zip(PART_COUNTS, values, strict=True):
            counts[f"splits/{piece.part}/{key}"] += value


def grouped(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield batches of about BATCH_BYTES; a long item may exceed it."""
    batch, total = list[T](), 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
