"""MinHash signatures, cut into bands: documents that agree on one whole band are worth a comparison.

A signature has bands * rows slots. Two documents agree on a slot with probability J, the Jaccard similarity
of their shingles, so on some band with probability 1 - (1 - J**rows)**bands (Leskovec, Rajaraman and Ullman,
Mining of Massive Datasets, section 3.4). The slots are rensa's R-MinHash, after the fast similarity sketching
of Dahlgaard, Knudsen and Thorup 2017 (arXiv:1704.04370).
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from mlm.corpus.dedup.shingles import Hashes, Numbers, flat_shingles, long_shingles
from mlm.corpus.sections import DedupConfig

Slots = NDArray[np.uint32]

NO_KEY = 0
"""The key, in every band, of a document without shingles: it matches nothing."""
SEED = 1
# A batch stays below what rensa spreads over threads of its own (128 sets, or about 10^5 shingles): a worker
# is one core. What fits the processor's caches is hashed twice as fast, too.
BATCH_DOCUMENTS = 64
BATCH_CHARACTERS = {"word": 1 << 18, "character": 1 << 16}
AT_ONCE = 1 << 16  # shingles of a long text signed at a time
_MULTIPLIER = np.uint64(0xFF51AFD7ED558CCD)


class Signer:
    """Signatures of documents under one configuration.

    A document's signature is a function of its set of shingles and the configuration: not of its neighbours,
    the machine or the number of threads.
    """

    def __init__(self, config: DedupConfig) -> None:
        self.config = config

    def keys(self, texts: Sequence[str]) -> Hashes:
        """One key per band of each text: uint64 [n, bands], NO_KEY throughout for a text without words.

        Equal keys mean equal bands, and the same band, but for a chance of 2^-64 per pair of documents.
        """
        bands = self.config.bands
        keys = np.full((len(texts), bands), NO_KEY, np.uint64)
        for begin, flat, offsets in self._batches(texts):
            full = np.flatnonzero(np.diff(offsets))
            keys[begin + full] = band_keys(self.slots(flat, offsets)[full], bands)
        return keys

    def long_keys(self, pieces: Iterable[str]) -> Hashes:
        """Keys of one text that comes in pieces: uint64 [1, bands]."""
        slots = self.long_slots(long_shingles(pieces, ngram=self.config.ngram, unit=self.config.unit))
        if slots is None:
            return np.full((1, self.config.bands), NO_KEY, np.uint64)
        return band_keys(slots, self.config.bands)

    def long_slots(self, shingles: Iterable[Hashes]) -> Slots | None:
        """Signature [1, bands * rows] of a set whose shingles come a part at a time; None without any.

        A slot holds a minimum over the set, so the signature of a union is the minimum of signatures.
        """
        found: Slots | None = None
        for part in shingles:
            for begin in range(0, len(part), AT_ONCE):
                some = part[begin : begin + AT_ONCE]
                slots = self.slots(some, np.array([0, len(some)]))
                found = slots if found is None else np.minimum(found, slots)
        return found

    def slots(self, flat: Hashes, offsets: Numbers) -> Slots:
        """Signatures [n, bands * rows] of sets given by their shingles: flat[offsets[i]:offsets[i + 1]]."""
        width = self.config.bands * self.config.rows
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            np.ascontiguousarray(flat), offsets.astype(np.uint64), num_perm=width, seed=SEED
        )
        return np.array(matrix.to_rows(), np.uint32).reshape(-1, width)

    def _batches(self, texts: Sequence[str]) -> Iterator[tuple[int, Hashes, Numbers]]:
        """The texts a few at a time: number of the first, shingles, offsets."""
        begin, most = 0, BATCH_CHARACTERS[self.config.unit]
        while begin < len(texts):
            end, characters = begin, 0
            while end < min(len(texts), begin + BATCH_DOCUMENTS) and characters < most:
                characters += len(texts[end])
                end += 1
            yield begin, *flat_shingles(texts[begin:end], ngram=self.config.ngram, unit=self.config.unit)
            begin = end


def band_keys(slots: Slots, bands: int) -> Hashes:
    """A strong 64-bit hash of each band of each signature: [n, bands * rows] to [n, bands]."""
    bands_of = slots.reshape(len(slots), bands, -1)
    keys = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64), (len(slots), bands)).copy()
    for row in range(bands_of.shape[2]):
        keys ^= bands_of[:, :, row]
        keys *= _MULTIPLIER
        keys ^= keys >> np.uint64(32)
    keys *= _MULTIPLIER
    keys ^= keys >> np.uint64(29)
    keys[keys == NO_KEY] = 1
    return keys
