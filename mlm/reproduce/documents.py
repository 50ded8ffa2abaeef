"""Documents as JSON lines, a file for each part of a corpus."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlm.util.atomic import write_atomic

__all__ = ["Document", "write_documents"]

Document = dict[str, str]
"""Its `text`, and where it is from."""


def write_documents(parts: Mapping[str, Sequence[Document]], out: Path) -> dict[str, int]:
    """Write PART.jsonl for each part; return the UTF-8 bytes of its text."""
    out.mkdir(parents=True, exist_ok=True)
    for part, documents in parts.items():
        lines = (json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
        write_atomic(out / f"{part}.jsonl", "".join(lines).encode("utf-8", "replace"))
    return {
        part: sum(len(document["text"].encode("utf-8", "replace")) for document in documents)
        for part, documents in parts.items()
    }
