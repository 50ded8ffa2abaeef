"""SplitMix64: hashes and counter-based random numbers for arrays.

Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". Output n of a stream is
the mix of state + (n + 1) * GOLDEN. An output may serve as the state of another stream, so a draw has a path,
such as (seed, sample, position). Integers alone: every machine and NumPy release draws the same numbers.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of a stream's counter."""
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHIFTS = 30, 27, 31
MASK = (1 << 64) - 1

Bits = NDArray[np.uint64]


def mix(bits: Bits) -> Bits:
    """Mix the 64 bits of each number, one to one, in place; return the array."""
    shifted = bits >> np.uint64(SHIFTS[0])
    bits ^= shifted
    bits *= np.uint64(FACTORS[0])
    np.right_shift(bits, np.uint64(SHIFTS[1]), out=shifted)
    bits ^= shifted
    bits *= np.uint64(FACTORS[1])
    np.right_shift(bits, np.uint64(SHIFTS[2]), out=shifted)
    bits ^= shifted
    return bits


def mix_int(bits: int) -> int:
    """Mix one Python integer below 2^64, faster than an array of one."""
    bits = ((bits ^ bits >> SHIFTS[0]) * FACTORS[0]) & MASK
    bits = ((bits ^ bits >> SHIFTS[1]) * FACTORS[1]) & MASK
    return bits ^ bits >> SHIFTS[2]


def root(seed: int) -> Bits:
    """State of a seed's stream, uint64 [1]."""
    return np.array([seed % (1 << 64)], dtype=np.uint64)


def draw(state: Bits, number: ArrayLike) -> Bits:
    """Output `number` (from 0) of the streams of `state`, uint64, broadcast; one of the two is an array."""
    counter = np.asarray(number).astype(np.uint64)
    return mix(np.atleast_1d(counter + np.uint64(1)) * np.uint64(GOLDEN) + state)


def uniform(bits: Bits) -> NDArray[np.float64]:
    """Numbers in [0, 1) in steps of 2**-53."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(bits: Bits, limit: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Integers from 0 to limit - 1, int64; `limit` broadcasts and is below 2**53."""
    return (uniform(bits) * limit).astype(np.int64)
