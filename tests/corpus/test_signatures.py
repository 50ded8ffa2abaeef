"""Signatures against what is proved of MinHash: slots agree with probability J, bands with J**rows."""

import math

import numpy as np
import pytest

from mlm.corpus.config import DedupConfig
from mlm.corpus.minhash import BATCH_DOCUMENTS, NO_KEY, MinHasher, Slots

CONFIG = DedupConfig(bands=42, rows=6)
RNG_SEED = 20190917
GOLDEN = [[17881121019154703858, 1071245217213772694], [5374615585964787492, 6747461728683282535]]


def agreement(common: int, union: int, trials: int, config: DedupConfig = CONFIG) -> np.ndarray:
    """Mask of slots that agree for pairs of random sets of that overlap: bool [trials, bands, rows]."""
    rng = np.random.default_rng(RNG_SEED)
    sets = rng.integers(0, 2**64, (trials, union), dtype=np.uint64)
    middle = common + (union - common) // 2
    a = slots_of(config, sets[:, :middle])
    b = slots_of(config, np.concatenate((sets[:, :common], sets[:, middle:]), axis=1))
    return (a == b).reshape(trials, config.bands, config.rows)


def slots_of(config: DedupConfig, sets: np.ndarray) -> Slots:
    offsets = np.arange(len(sets) + 1) * sets.shape[1]
    return MinHasher(config).slots(sets.reshape(-1), offsets)


@pytest.mark.parametrize(
    "common, union", [(1, 2), (7, 10), (18, 20), (35, 50), (125, 250), (210, 300), (700, 1000), (2800, 4000)]
)
def test_slots_agree_with_probability_j(common: int, union: int) -> None:
    trials, j = 300, common / union
    mean = agreement(common, union, trials).mean()
    # no more variance than independent slots have: rensa's is lower
    assert abs(mean - j) < 5 * math.sqrt(j * (1 - j) / (trials * CONFIG.bands * CONFIG.rows))


@pytest.mark.parametrize("common, union", [(10, 20), (100, 200), (1000, 2000)])
def test_pairs_are_proposed_as_often_as_the_formula_says(common: int, union: int) -> None:
    trials = 1000
    expected = 1 - (1 - (common / union) ** CONFIG.rows) ** CONFIG.bands  # 0.48 at J = 0.5
    proposed = agreement(common, union, trials).all(axis=2).any(axis=1).mean()
    assert abs(proposed - expected) < 5 * math.sqrt(expected * (1 - expected) / trials)


def test_a_signature_does_not_depend_on_its_neighbours() -> None:
    texts = [f"document number {i} " * (i % 7) + f"ends {i}" for i in range(3 * BATCH_DOCUMENTS + 5)]
    signer = MinHasher(CONFIG)
    together = signer.keys(texts)
    alone = np.concatenate([signer.keys([text]) for text in texts])
    assert np.array_equal(together, alone)


def test_a_text_without_words_has_a_key_of_its_own() -> None:
    keys = MinHasher(CONFIG).keys(["words", "...", "", "words"])
    assert np.all(keys[1:3] == NO_KEY)
    assert np.all(keys[[0, 3]] != NO_KEY)
    assert np.array_equal(keys[0], keys[3])


def test_keys_of_this_version_stay_what_they_are() -> None:
    """A build is resumed with keys written before: a change here, or of rensa's, needs a new format."""
    texts = ["five words make one shingle", "Großes Haus, naïve Zeit"]
    keys = MinHasher(DedupConfig(bands=2, rows=3)).keys(texts)
    assert keys.tolist() == GOLDEN
