"""The first entries of a shuffle are those of the whole."""

import numpy as np
import pytest

from mlm.data.epochs import permutation


@pytest.mark.parametrize("head", [1, 2, 63, 999, 1000, 2000])
def test_head_of_a_permutation_is_its_first_entries(head: int) -> None:
    whole = permutation(1000, 3, 4, stream=0)
    np.testing.assert_array_equal(permutation(1000, 3, 4, stream=0, head=head), whole[:head])
