"""Random numbers as functions of (seed, place), so that no generator state has to be kept.

Initial weights are drawn per parameter, dropout masks (mlm/parallel/dropout.py) per sample and place.
Restarting, recomputing an activation or another layout then gives the same numbers without saving anything.
"""

import zlib

import torch
from torch import Tensor

from mlm.util.splitmix import GOLDEN, MASK, mix_int


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and names; the same on every machine."""
    state = GOLDEN
    for part in parts:
        value = zlib.crc32(part.encode()) | 1 << 40 if isinstance(part, str) else part
        state = mix_int(state ^ (value & MASK))
    return state >> 1


def draw_normal(shape: tuple[int, ...], std: float, seed: int, rows: range | None = None) -> Tensor:
    """float32 N(0, std²) tensor of `shape` on the CPU; with `rows`, only those rows of it.

    Drawn in blocks of rows with a seed each, so a rank that holds some rows draws little more than those.
    """
    rows = range(shape[0]) if rows is None else rows
    row_size = 1
    for size in shape[1:]:
        row_size *= size
    block = max(1, (1 << 18) // max(1, row_size))  # a function of the global shape alone
    out = torch.empty((len(rows), *shape[1:]))
    if len(rows) == 0:
        return out
    generator = torch.Generator()
    for index in range(rows.start // block, -(-rows.stop // block)):
        first, last = index * block, min((index + 1) * block, shape[0])
        generator.manual_seed(derive_seed(seed, index))
        drawn = torch.empty((last - first, *shape[1:])).normal_(0.0, std, generator=generator)
        low, high = max(first, rows.start), min(last, rows.stop)
        out[low - rows.start : high - rows.start] = drawn[low - first : high - first]
    return out
