"""Sizes of the pieces in which the vocabulary loss goes through its rows. No torch: plans ask too."""

import math
from typing import NamedTuple

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Largest piece of float32 logits. CPU: 256 rows at V=50,304, measured best; smaller starves the products,
larger falls out of the cache."""
HALF_BLOCKS = 4
"""Blocks of float32 logits in a chunk of half-precision ones on a CPU, where adding a chunk's gradient of the
weight takes three passes over the weight."""


class ChunkRows(NamedTuple):
    """Rows of logits at a time. Pieces of one kind are of one size but the last."""

    chunk: int
    """That exist, and whose products are computed together."""
    block: int
    """That are float32 (float64 for float64 input); on a CPU fewer than exist in half precision."""


def chunk_rows(
    rows: int, columns: int, device: str, *, half: bool, chunk_bytes: int | None = None
) -> ChunkRows:
    """Return the rows in a chunk of `rows` [columns] logits, and in a block of it.

    `device` is a torch.device's type, `half` true for 16-bit input; `chunk_bytes` overrides CHUNK_BYTES.
    """
    limit = CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) if chunk_bytes is None else chunk_bytes
    most = max(1, limit // (4 * columns))
    chunk = _even_part(rows, HALF_BLOCKS * most if half and device == "cpu" else most)
    return ChunkRows(chunk, _even_part(chunk, most))


def _even_part(rows: int, most: int) -> int:
    """Return the least size of which as few parts hold `rows` as of size `most`."""
    return math.ceil(rows / max(1, math.ceil(rows / most)))
