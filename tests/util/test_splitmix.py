"""Draws by number: SplitMix64's outputs, and numbers made from them."""

import numpy as np
import pytest

from mlm.util.splitmix import below, draw, mix, mix_int, root, uniform

# Test vectors of SplitMix64; those of 1234567 are in Rosetta Code, "Pseudo-random numbers/Splitmix64".
PUBLISHED = {
    0: [0xE220A8397B1DCDAF],
    1234567: [
        *(6457827717110365317, 3203168211198807973, 9817491932198370423),
        *(4593380528125082431, 16408922859458223821),
    ],
}


@pytest.mark.parametrize("seed", PUBLISHED)
def test_draws_are_the_published_outputs(seed: int) -> None:
    assert draw(root(seed), np.arange(len(PUBLISHED[seed]))).tolist() == PUBLISHED[seed]


def test_draw_serves_each_stream_its_number() -> None:
    states = np.concatenate([root(0), root(1234567)])
    assert draw(states, np.array([0, 2])).tolist() == [PUBLISHED[0][0], PUBLISHED[1234567][2]]


def test_draws_below_a_limit_are_even_and_stay_below_it() -> None:
    extremes = np.array([0, (1 << 64) - 1], dtype=np.uint64)
    assert uniform(extremes).tolist() == [0.0, 1 - 2.0**-53]
    for limit in (1, 3, 30_522, (1 << 31) + 1, (1 << 52) + 1):
        assert below(extremes, limit).tolist() == [0, limit - 1]
    counts = np.bincount(below(draw(root(5), np.arange(70_000)), 7), minlength=7)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 40  # chi-square, 6 degrees: probability 5e-7


def test_one_integer_is_mixed_as_in_an_array() -> None:
    bits = draw(root(3), np.arange(100))
    assert [mix_int(int(x)) for x in bits] == mix(bits.copy()).tolist()
