"""Assignment of documents to parts."""

from collections import Counter

import pytest

from mlm.data.corpus_files import parse_split, split_of_document
from mlm.util.errors import UserError


@pytest.mark.parametrize("text", ["0.9,0.1,0", "0.9/0.1/0"])
def test_split_takes_commas_and_slashes(text: str) -> None:
    assert parse_split(text) == (0.9, 0.1, 0)


@pytest.mark.parametrize("text", ["", "0.9,0.1", "0.9,0.2,0", "a,b,c", "0,1,0", "1.5,-0.5,0", "nan,0,0"])
def test_split_that_does_not_sum_to_one_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match="split="):
        parse_split(text)


def test_documents_fall_into_parts_by_their_shares() -> None:
    counts = Counter(split_of_document(b"%d" % i, (0.8, 0.2, 0), seed=1) for i in range(10_000))
    assert counts["test"] == 0
    assert abs(counts["validation"] - 2000) < 200  # five standard deviations


def test_part_of_a_document_depends_on_the_seed() -> None:
    parts = [[split_of_document(b"%d" % i, (0.5, 0.5, 0), seed) for i in range(50)] for seed in (1, 1, 2)]
    assert parts[0] == parts[1] != parts[2]
