"""The steps that sampling spends its time in, shaped for the memory and the vector units of a core."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

STRIDE = 32  # entries of a sorted array per entry of its coarse copy
SHORT_RUN = 128  # tokens: below that, on average, one fancy index beats a slice per run

Ints = NDArray[np.int64]


def stable_argsort(raw: NDArray[np.uint64]) -> Ints:
    """np.argsort(raw, kind="stable"), int64 [n], for random numbers in a third of the time.

    A number's low bits make room for its place; such values can be sorted without an index beside them,
    for which NumPy has vector instructions. Numbers that agree in what is left are then sorted whole.
    """
    bits = np.uint64(len(raw).bit_length())
    packed = (raw >> bits << bits) | np.arange(len(raw), dtype=np.uint64)
    packed.sort()
    order = (packed & ((np.uint64(1) << bits) - np.uint64(1))).view(np.int64)
    packed >>= bits
    again = np.flatnonzero(packed[1:] == packed[:-1])
    tied = np.union1d(again, again + 1)
    places = order[tied]
    order[tied] = places[np.lexsort((places, raw[places]))]
    return order


def coarse(rising: Ints) -> Ints:
    """The last of every STRIDE entries, as an array of its own that fits a cache: [len(rising) // STRIDE]."""
    return rising[STRIDE - 1 :: STRIDE].copy()


def first_above(rising: Ints, coarse_copy: Ints, values: Ints) -> Ints:
    """np.searchsorted(rising, values, side="right") for values below the last entry: int64 [n].

    A plain search of a large array waits for memory at each of its steps; here all but the last stay in
    the coarse copy, and the last looks at neighbours.
    """
    low = np.searchsorted(coarse_copy, values, side="right") * STRIDE
    near = np.minimum(low[:, None] + np.arange(STRIDE), len(rising) - 1)
    return low + np.count_nonzero(rising[near] <= values[:, None], axis=1)


def copy_runs(tokens: NDArray[Any], begin: Ints, length: Ints, out: Ints) -> None:
    """Fill `out` with tokens[b : b + n] of every run, one after another. begin, length: [runs]."""
    ends = begin + length
    if len(out) < SHORT_RUN * len(begin):
        # Both ends of all runs are fetched first, many at a time: a run alone would wait for each of its own.
        _ = tokens[begin[length > 0]], tokens[ends[length > 0] - 1]
        index = np.arange(len(out))
        index += np.repeat(ends - np.cumsum(length), length)
        out[:] = tokens[index]
        return
    # Slices of a memoryview are made and joined several times faster than array slices are assigned.
    view = memoryview(tokens.data)
    content = b"".join([view[b:e] for b, e in zip(begin.tolist(), ends.tolist(), strict=True)])
    out[:] = np.frombuffer(content, dtype=tokens.dtype)
