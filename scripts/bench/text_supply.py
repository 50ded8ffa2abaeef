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


def paragraphs_of(text: Path | None) -> list[str]:
    """Paragraphs of the lines {"text": …} of a file, or of the plays. Raises UserError."""
    if text is None:
        documents = [scene for _, play in sorted(read_plays().items()) for scene in scenes(play)]
    else:
        try:
            documents = [json.loads(line)["text"] for line in text.read_text("utf-8").splitlines()]
        except OSError as error:
            raise UserError(f"--text {text}: {error.strerror}: give a file that can be read") from error
        except (ValueError, TypeError, KeyError):
            raise UserError(f'--text {text}: give JSON lines {{"text": …}} in UTF-8') from None
    return [paragraph for document in documents for paragraph in document.split("\n\n")]


def read_passages(text: Path | None) -> list[str]:
    """The paragraphs of some length, each once. Raises UserError for few."""
    passages = list(dict.fromkeys(p for p in paragraphs_of(text) if len(p) >= 40))
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
