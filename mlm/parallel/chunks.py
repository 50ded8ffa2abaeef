"""Sizes of the pieces in which the vocabulary loss goes through its rows. No torch: plans ask too."""

import math
from typing import NamedTuple

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Largest piece of float32 logits. CPU: 256 rows at V=50,304, measured best; smaller starves the products,
larger falls out of the cache. GPU: few chunks, as a small model's step waits for the host's launches."""
HALF_CHUNKS = 8
"""Chunks of float32 logits whose rows make one of half-precision ones on a CPU: adding a chunk's gradient of
the weight takes three passes over the weight there."""
HALF_BLOCK_BYTES = 4 << 20
"""Largest block of half-precision logits that are float32 at a time on a CPU: the passes over one find it in
the cache. 2,048 rows at V=50,304 take a Zen 4 core 95 to 120 ms, and 140 to 150 in blocks of CHUNK_BYTES.
Smaller is no faster, and over tp each block waits for the other ranks: 5 % of the loss's time in 2 MiB."""


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
    if not half or device != "cpu":
        return ChunkRows(*2 * (_even_part(rows, most),))
    chunk = _even_part(rows, HALF_CHUNKS * most)
    return ChunkRows(chunk, _even_part(chunk, max(1, min(limit, HALF_BLOCK_BYTES) // (4 * columns))))


def _even_part(rows: int, most: int) -> int:
    """Return the least size of which as few parts hold `rows` as of size `most`."""
    return math.ceil(rows / max(1, math.ceil(rows / most)))
