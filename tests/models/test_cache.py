"""Attention of a cached step, with rows of different lengths and a window.

Layouts, and rows that are filled later or moved: tests/inference/test_generation.py.
"""

import pytest
import torch
from torch import Tensor

from mlm.models.cache import (
    FIRST_COLUMNS,
    DecodePass,
    KeyValueCache,
    PrefillPass,
    causal_attention,
    merge_heads,
)
from mlm.parallel.config import AttentionScores

HEADS, KV_HEADS, D, LONGEST = 4, 2, 6, 12
CPU = torch.device("cpu")


def heads(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, count, LONGEST, D, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("lengths", [(9, 2, 5), (7, 7, 7)], ids=str)
@pytest.mark.parametrize("window", [0, 1, 7, LONGEST])
def test_a_step_attends_to_what_reading_everything_again_does(
    lengths: tuple[int, int, int], window: int
) -> None:
    q, k, v = heads(HEADS, 0), heads(KV_HEADS, 1), heads(KV_HEADS, 2)
    cache, scores = KeyValueCache(3, LONGEST), AttentionScores(window=window)
    for row, n in enumerate(lengths):
        PrefillPass(cache, (row,)).attend(0, *(x[row : row + 1, :, :n] for x in (q, k, v)), scores)
    last = [torch.stack([x[row, :, n : n + 1] for row, n in enumerate(lengths)]) for x in (q, k, v)]
    found = DecodePass(cache, lengths, dtype=torch.float64, device=CPU).attend(0, *last, scores)
    for row, n in enumerate(lengths):
        whole = (x[row : row + 1, :, : n + 1] for x in (q, k, v))
        want = merge_heads(causal_attention(*whole, scores))[-1:]
        torch.testing.assert_close(found[:, row : row + 1], want, rtol=0, atol=1e-12)


def test_a_cache_is_as_large_as_its_columns_and_keeps_them_as_it_grows() -> None:
    cache, like = KeyValueCache(2, 10 * FIRST_COLUMNS), torch.zeros(1, 1, 1, 1)
    keys, values = cache.layer(0, like, FIRST_COLUMNS)
    assert cache.layer(0, like, FIRST_COLUMNS)[0] is keys
    keys[1], values[1] = 2.0, 3.0
    keys, values = cache.layer(0, like, FIRST_COLUMNS + 1)
    assert keys.shape[2] == 2 * FIRST_COLUMNS
    assert (keys.sum(), values.sum()) == (2 * FIRST_COLUMNS, 3 * FIRST_COLUMNS)


def test_the_cache_never_outgrows_the_model() -> None:
    cache, like = KeyValueCache(1, FIRST_COLUMNS + 1), torch.zeros(1, 2, 1, 3)
    assert cache.layer(0, like, 1)[0].shape == (1, 2, FIRST_COLUMNS, 3)
    assert cache.layer(0, like, FIRST_COLUMNS + 1)[0].shape == (1, 2, FIRST_COLUMNS + 1, 3)


def test_rows_of_equal_lengths_need_no_mask_and_a_moved_row_keeps_its_tokens() -> None:
    cache, x = KeyValueCache(2, 8), heads(KV_HEADS, 3)[:2, :, :5]
    PrefillPass(cache, (0, 1)).keep(0, x, x + 1)
    assert DecodePass(cache, [5, 5], dtype=torch.float64, device=CPU).bias(0) is None
    cache.move(1, 0, 5)
    keys, values = cache.layer(0, x, 5)
    assert torch.equal(keys[0, :, :5], x[1])
    assert torch.equal(values[0, :, :5], x[1] + 1)
