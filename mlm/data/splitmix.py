"""Random numbers by number: the n-th draw of a stream is computed alone, for whole arrays at once.

SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): output n of a
stream is a mix of state + (n + 1) * GOLDEN. An output serves as the state of a stream of its own, so a draw
has a path, such as (seed, sample, place). Integers alone, so every machine and every NumPy draws the same.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))

Bits = NDArray[np.uint64]


def root(seed: int) -> Bits:
    """State of a seed's stream: uint64 [1]."""
    return np.array([seed % (1 << 64)], dtype=np.uint64)


def draw(state: Bits, number: ArrayLike) -> Bits:
    """Output `number` (from 0) of the streams of `state`, uint64, broadcast; one of the two is an array."""
    bits = np.asarray(number).astype(np.uint64)
    bits = np.atleast_1d(bits + np.uint64(1)) * GOLDEN + state
    bits ^= bits >> SHIFTS[0]
    bits *= FACTORS[0]
    bits ^= bits >> SHIFTS[1]
    bits *= FACTORS[1]
    bits ^= bits >> SHIFTS[2]
    return bits


def uniform(bits: Bits) -> NDArray[np.float64]:
    """Numbers in [0, 1) in steps of 2**-53."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(bits: Bits, limit: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Integers from 0 to limit - 1, int64; `limit` broadcasts and is below 2**53."""
    return (uniform(bits) * limit).astype(np.int64)
