"""Small corpora to blend, told apart by their tokens, and what a run's files say of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mlm.checkpoint.native.save_load import latest_checkpoint, read_manifest
from mlm.util.files import digest_file
from tests.data.corpora import write_corpus

VOCAB = 1000
NAMES = ("wiki", "web", "code")


def add_receipt(folder: Path, tokenizer: str = "1") -> None:
    receipt = {
        "vocab_size": VOCAB,
        "tokenizer": f"xxh3:{tokenizer:0>32}",
        "files": {
            f"{part}.bin": {
                "bytes": (folder / f"{part}.bin").stat().st_size,
                "digest": digest_file(folder / f"{part}.bin"),
            }
            for part in ("train", "validation")
        },
    }
    (folder / "corpus.json").write_text(json.dumps(receipt))


def write_corpora(root: Path) -> Path:
    """Corpora wiki, web and code. The tokens of their training parts do not overlap."""
    random = np.random.default_rng(1)
    for number, name in enumerate(NAMES):
        (root / name).mkdir()
        tokens = 300 * number + np.arange(290)  # each stands once: it tells the corpus and the place
        write_corpus(root / name / "train", np.split(tokens, [40, 100, 190]))
        write_corpus(root / name / "validation", [random.integers(0, VOCAB, 30 + 20 * number).tolist()])
        add_receipt(root / name)
    return root


def segments(out: str | Path) -> list[dict[str, Any]]:
    """Of the newest checkpoint."""
    path = latest_checkpoint(Path(out, "checkpoints"))
    return read_manifest(path).state["data"]["segments"]  # type: ignore[no-any-return]
