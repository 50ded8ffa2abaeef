"""The parts of a corpus, train, validation and test, and which document falls in which."""

import math
import struct
from collections.abc import Iterable

import xxhash

from mlm.errors import UserError

SPLITS = ("train", "validation", "test")


def parse_split(text: str) -> tuple[float, ...]:
    """Shares of train, validation and test. Raises UserError unless they are three and sum to 1."""
    try:
        shares = tuple(float(share) for share in text.replace("/", ",").split(","))
    except ValueError:
        shares = ()
    sound = len(shares) == len(SPLITS) and all(0 <= share <= 1 for share in shares) and shares[0] > 0
    if not sound or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise UserError(
            f"split={text} is not three shares that sum to 1: write for instance split=0.98/0.01/0.01"
        )
    return shares


def part_of(text: bytes | Iterable[bytes], shares: Iterable[float], seed: int) -> str:
    """The part a document falls in: a function of (seed, its text) alone. The text may come in blocks.

    So a document stays in its part when others come or go, and equal documents fall in the same one.
    """
    digest = xxhash.xxh3_64(struct.pack("<Q", seed % (1 << 64)))
    for block in (text,) if isinstance(text, bytes) else text:
        digest.update(block)
    draw = digest.intdigest() / 2**64
    bound, part = 0.0, SPLITS[0]
    for name, share in zip(SPLITS, shares, strict=True):
        if share > 0:
            bound, part = bound + share, name
            if draw < bound:
                return part
    return part  # the shares sum to a hair less than 1
